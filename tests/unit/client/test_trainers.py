"""What the machine of the trainers wants is carried out: starts, fences, releases, and what is said of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest
from tests.alongside import until
from tests.unit.client.noted import NotedLedger

from shoal.client.trainers import TrainerPool
from shoal.clock import SystemClock
from shoal.errors import RemoteProtocolError
from shoal.events.losses import TrainerReady
from shoal.events.trainers import TrainerFenced, TrainerNotReplaced, TrainerReplaced
from shoal.ids import PeerId, StageIndex
from shoal.runtime.launcher_messages import LauncherAnswer, StartTrainer
from shoal.runtime.waking import Signal
from shoal.swarm.takeover import Settled
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello, TrainerStuck
from shoal.wire.messages.feed import Released
from shoal.wire.messages.step import Fence, Fenced

A, B = PeerId("A"), PeerId("B")
STEPS = StepRange(4, 8)


def hello(slot: int, generation: int) -> Received:
    name = f"T{slot}"
    return Received(PeerId(name), TrainerHello(slot, generation, Hop(PeerId(name), (f"memory:{name}",))))


class Desk:
    """A client with two replicas whose answers the test gives; launcher and data server answer at once."""

    def __init__(self, start_timeout_s: float = 5.0) -> None:
        self.network = network = MemoryNetwork()
        self.replicas = {peer: network.endpoint(peer) for peer in (A, B)}
        replicas = tuple(Replica(replica.hop, 0.0, stage=StageIndex(0)) for replica in self.replicas.values())
        self.view_changed = Signal()
        self.membership = SimpleNamespace(view=SwarmView(replicas), changed=self.view_changed.wait)
        self.client, self.ledger = network.endpoint(PeerId("client")), NotedLedger()
        for replica in self.replicas.values():
            self.client.introduce(replica.hop)
        self.started: list[tuple[int, int]] = []
        self.on_start: Callable[[int, int], object] = self.say_hello
        self.error = ""
        self.releases: list[tuple[int, int, Settled]] = []
        self.finished = Signal()
        self.gone_on: list[tuple[int, StepRange]] = []
        self.slots = TrainerSlots(start_timeout_s=start_timeout_s)
        self.pool = TrainerPool(
            slots=self.slots,
            endpoint=self.client,
            launcher=self,  # type: ignore[arg-type]
            membership=self.membership,  # type: ignore[arg-type]
            data=self,  # type: ignore[arg-type]
            reports=self,  # type: ignore[arg-type]
            ledger=self.ledger,
            clock=SystemClock(),
        )

    async def request(self, asked: StartTrainer) -> LauncherAnswer:
        self.started.append((asked.slot, asked.generation))
        if not self.error:
            self.on_start(asked.slot, asked.generation)
        return LauncherAnswer(self.error)

    async def release(self, slot: int, generation: int, settled: Settled) -> Released:
        self.releases.append((slot, generation, settled))
        return Released(slot, generation, STEPS.first, is_known=True)

    def last_number(self, slot: int) -> int:
        return 4

    async def ensure(self, num_slots: int) -> None:
        """Have the trainers started that are missing between two rounds."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.pool.run)
            for start in self.slots.want(num_slots):
                self.pool.start(start)
            await until(lambda: not self.slots.launching(range(num_slots)))
            tasks.cancel_scope.cancel()

    def say_hello(self, slot: int, generation: int) -> None:
        assert self.pool.receive(hello(slot, generation))

    @asynccontextmanager
    async def training(self, steps: StepRange = STEPS) -> AsyncGenerator[None]:
        def go_on(slot: int, rest: StepRange) -> None:
            self.gone_on.append((slot, rest))

        slots, both = frozenset({0, 1}), {A, B}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.pool.run)
            self.pool.begin_round(3, slots, steps, named=both, steady=both, go_on=go_on)
            yield
            self.slots.end_round()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    def kinds(self) -> list[type]:
        return [type(event) for event in self.ledger.noted if not isinstance(event, TrainerReady)]


async def asked(replica: MemoryEndpoint) -> Fence:
    async for event in replica.events():
        if isinstance(event, Received) and isinstance(event.message, Fence):
            return event.message
    raise AssertionError("nothing was asked")


async def test_trainers_that_are_missing_are_started() -> None:
    desk = Desk()
    await desk.ensure(2)
    desk.pool.peer_lost(PeerId("T0"))
    await desk.ensure(2)
    assert desk.started == [(0, 1), (1, 1), (0, 2)]
    assert [type(event) for event in desk.ledger.noted] == [TrainerReady] * 3


async def test_other_messages_are_not_taken() -> None:
    assert not Desk().pool.receive(Received(PeerId("T0"), TrainerStuck(0, 1, ())))


async def test_hellos_that_go_on_and_were_not_asked_for_leave_a_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SystemClock, "now_s", lambda _: 0.0)
    pool = Desk().pool
    caplog.clear()  # what a test before has made loud
    for generation in range(30):
        assert pool.receive(hello(0, generation + 1))
    assert [record.getMessage() for record in caplog.records] == ["trainer.stale"] * 5


async def test_why_a_trainer_cannot_be_started_is_kept_for_whoever_waits_for_it() -> None:
    desk = Desk()
    desk.error = "no memory"
    await desk.ensure(2)
    assert desk.slots.refusal(0) == "trainer 0 could not be started: no memory"


async def test_a_lost_trainer_is_replaced_when_all_replicas_have_answered_and_its_leases_are_free() -> None:
    desk = Desk()
    await desk.ensure(2)
    desk.ledger.noted.clear()
    async with desk.training():
        desk.pool.peer_lost(PeerId("T1"))
        assert await asked(desk.replicas[A]) == await asked(desk.replicas[B]) == Fence({1: 2})
        desk.pool.receive(Received(A, Fenced({1: 2}, (), (), 3, {}, steady=True)))
        assert await asked(desk.replicas[B]) == Fence({1: 2}), "it is asked again as time goes on"
        assert desk.releases == []
        desk.pool.receive(Received(B, Fenced({1: 2}, (), (), 3, {}, steady=True)))
        await until(lambda: desk.gone_on)
    assert desk.started[2:] == [(1, 2)]
    [(slot, generation, settled)] = desk.releases
    assert (slot, generation, settled.complete) == (1, 1, True)
    assert desk.gone_on == [(1, StepRange(5, 8))], "a trainer of the slot has reported step 4"
    assert desk.kinds() == [TrainerFenced, TrainerReplaced]
    desk.pool.peer_lost(PeerId("T1"))
    assert desk.started[3:] == [], "the round is trained no longer"


async def test_a_replica_that_leaves_the_view_is_not_waited_for() -> None:
    desk = Desk()
    await desk.ensure(2)
    async with desk.training():
        desk.pool.peer_lost(PeerId("T1"))
        await asked(desk.replicas[A])
        desk.membership.view = SwarmView()
        desk.view_changed.notify()
        await until(lambda: desk.gone_on)
    [(_, _, settled)] = desk.releases
    assert not settled.complete


async def test_that_a_slot_has_no_trainer_is_noted_and_its_end_is_not_waited_for() -> None:
    desk = Desk()
    await desk.ensure(2)
    desk.ledger.noted.clear()
    desk.error, coming = "no memory", desk.finished.coming
    async with desk.training(StepRange(8, 8)):
        desk.pool.peer_lost(PeerId("T1"))
        await coming.wait()
    assert desk.ledger.noted == [TrainerNotReplaced(1, "trainer 1 could not be started: no memory")]
    assert desk.slots.is_done(1)


async def test_a_trainer_whose_launch_fails_when_the_round_is_over_is_started_anew_in_the_next_one() -> None:
    desk = Desk(start_timeout_s=60.0)
    await desk.ensure(2)
    async with desk.training(StepRange(8, 8)):
        desk.error = "no memory"
        desk.pool.peer_lost(PeerId("T1"))
    desk.error = ""
    await desk.ensure(2)
    assert desk.started[2:] == [(1, 2), (1, 3)]


async def test_nobody_of_another_host_is_a_trainer() -> None:
    desk = Desk()
    await desk.ensure(1)
    desk.network.elsewhere.add(PeerId("T0"))
    with pytest.raises(RemoteProtocolError, match="none of this host"):
        desk.pool.receive(hello(0, 1))
    mallory = PeerId("mallory")
    desk.network.elsewhere.add(mallory)
    with pytest.raises(RemoteProtocolError, match="mallory"):
        desk.pool.receive(Received(mallory, TrainerHello(0, 1, Hop(mallory, ()))))
    assert desk.slots.present[0].peer == "T0"
