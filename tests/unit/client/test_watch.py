"""What a lost connection changes at once, and which steps end a failover."""

from __future__ import annotations

import anyio
import pytest

from shoal.client.diary import Lost
from shoal.client.loss_notices import LossNotices
from shoal.client.trainers import TrainerPool
from shoal.client.watch import Watch
from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import StageRecord
from shoal.ids import PeerId, StepKey
from shoal.runtime.launcher_messages import LauncherAnswer, StartTrainer
from shoal.testing.registry import LocalRegistry
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import StepReport, TrainerHello

pytestmark = pytest.mark.anyio

SERVER, TRAINER = PeerId("server"), PeerId("T0")


class Launcher:
    pool: TrainerPool

    async def request(self, asked: StartTrainer) -> LauncherAnswer:
        hello = TrainerHello(asked.slot, asked.generation, Hop(TRAINER, ("memory:T0",)))
        self.pool.receive(Received(TRAINER, hello))
        return LauncherAnswer()


async def make_watch(
    dialled: list[PeerId] | None = None, said: list[str] | None = None
) -> tuple[Watch, Membership, list[float]]:
    registry = LocalRegistry(SystemClock())
    registry.of(SERVER).advertise(StageRecord(("memory:server",), 0.0, stage=0))
    membership = registry.watch()
    launcher = Launcher()
    endpoint = MemoryNetwork().endpoint(PeerId("client"))
    pool = launcher.pool = TrainerPool(endpoint=endpoint, launcher=launcher, start_timeout_s=5)
    await pool.ensure(1)
    now_s = [0.0]
    watch = Watch(
        membership=membership,
        trainers=pool,
        slots_of_replica=lambda _: frozenset({0}),
        age_s=lambda: now_s[0],
        clock=Clock(now_s),
        notices=LossNotices(clock=Clock(now_s), notice=said.append if said is not None else str, name_of=str),
        dial=lambda peer: None if dialled is None else dialled.append(peer),
    )
    return watch, membership, now_s


class Clock(SystemClock):
    """The machine has run for 1000 seconds longer than the run."""

    def __init__(self, age_s: list[float]) -> None:
        self._age_s = age_s

    def now_s(self) -> float:
        return 1000.0 + self._age_s[0]


def step(slot: int = 0, at_s: float = 0.0) -> StepReport:
    return StepReport(slot, 1, StepKey(slot, 1, 0, 0), 4, 5.0, 1.0, 0.1, False, 0.5, 1000.0 + at_s)


async def test_a_lost_server_leaves_the_view_and_its_failover_ends_with_the_next_step() -> None:
    watch, membership, now_s = await make_watch()
    assert membership.view.replica(SERVER) is not None
    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(membership.changed)
            await anyio.wait_all_tasks_blocked()
            watch.peer_lost(SERVER)
    assert membership.view.replica(SERVER) is None
    now_s[0] = 1.5
    assert not watch.receive(Received(TRAINER, step(at_s=1.5)))
    watch.peer_lost(SERVER)
    assert watch.failovers.as_json() == [{"kind": "server", "at_s": 0.0, "recovered_after_s": 1.5}]


async def test_a_lost_trainer_is_a_failover_and_any_other_peer_is_none() -> None:
    watch, _, _ = await make_watch()
    watch.peer_lost(PeerId("monitor"))
    watch.peer_lost(TRAINER)
    assert [each["kind"] for each in watch.failovers.as_json()] == ["trainer"]


async def test_the_first_step_is_timed_once_and_only_by_a_trainer_of_the_run() -> None:
    watch, _, now_s = await make_watch()
    for peer, report, at_s in (
        (PeerId("x"), step(at_s=1.0), 1.0),
        (TRAINER, step(1, 2.0), 2.0),
        (TRAINER, step(at_s=3.0), 3.0),
    ):
        now_s[0] = at_s
        watch.receive(Received(peer, report))
    assert watch.seconds_to_first_step == 3.0
    now_s[0] = 4.0
    watch.receive(Received(TRAINER, step()))
    assert watch.seconds_to_first_step == 3.0


async def test_a_step_counts_from_when_it_was_committed_whenever_it_is_heard_of() -> None:
    watch, _, now_s = await make_watch()
    now_s[0] = 5.0
    noted: list[Lost] = []
    watch._note = noted.append
    watch.lost("client", (0,), 2.0)
    watch.receive(Received(TRAINER, step(at_s=1.5)))
    assert watch.failovers.as_json()[0]["recovered_after_s"] is None, "it was committed before"
    watch.receive(Received(TRAINER, step(at_s=2.25)))
    assert watch.failovers.as_json() == [{"kind": "client", "at_s": 2.0, "recovered_after_s": 0.25}]
    assert watch.seconds_to_first_step == 1.5
    assert noted == [Lost("client", (0,), 2.0)]


async def test_a_lost_server_is_dialled_once_and_nobody_else_is() -> None:
    dialled: list[PeerId] = []
    watch, membership, _ = await make_watch(dialled)
    watch.peer_lost(TRAINER)
    watch.peer_lost(PeerId("stranger"))
    assert dialled == []
    watch.peer_lost(SERVER)
    watch.peer_lost(SERVER)  # it could not be reached
    assert dialled == [SERVER]
    membership.found(SERVER)
    watch.peer_lost(SERVER)
    assert dialled == [SERVER, SERVER]


async def test_the_user_is_told_who_is_lost_and_when_the_trainer_that_it_hit_trains_again() -> None:
    said: list[str] = []
    watch, _, now_s = await make_watch(said=said)
    watch.step_committed(step(at_s=1.0))
    now_s[0] = 2.0
    watch.peer_lost(SERVER)
    watch.peer_lost(TRAINER)
    watch.data_server_lost()
    now_s[0] = 4.0
    watch.step_committed(step(at_s=3.5))
    assert said == [
        "server (stage 0) is gone: its connection has closed; nobody else serves stage 0",
        "trainer 0 trains again after 2.5 s without a step (server, trainer 0 and the data server lost)",
    ]
