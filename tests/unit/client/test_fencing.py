"""What a lost trainer has done is asked of every live replica; lost ones are not waited for, silent ones not long."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.client.fencing import Fencing
from shoal.clock import SystemClock
from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm import takeover
from shoal.swarm.takeover import Settled
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.step import Fence, Fenced

A, B = PeerId("A"), PeerId("B")
KEY, LATER, OTHER = StepKey(1, 1, 4, 0), StepKey(1, 1, 5, 0), StepKey(0, 1, 4, 0)


class Desk:
    """A client with two replicas whose answers the test gives."""

    def __init__(self) -> None:
        network = MemoryNetwork()
        self.replicas = {peer: network.endpoint(peer) for peer in (A, B)}
        replicas = tuple(Replica(replica.hop, 0.0, stage=StageIndex(0)) for replica in self.replicas.values())
        self.membership = SimpleNamespace(view=SwarmView(replicas))
        self.client = network.endpoint(PeerId("client"))
        for replica in self.replicas.values():
            self.client.introduce(replica.hop)
        self.fencing = Fencing(
            endpoint=self.client,
            clock=SystemClock(),
            ledger=NotedLedger(),
            membership=self.membership,  # type: ignore[arg-type]
        )
        self.named = {A, B}
        self.fencing.begin_round(3, self.named, ())
        self.settled: Settled | None = None

    async def settle(self) -> None:
        self.settled = await self.fencing.settle(1, 2)

    async def answered_by_all(self) -> Settled:
        """What comes of it when both say that they have committed nothing."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.settle)
            await anyio.wait_all_tasks_blocked()
            self.answer(A)
            self.answer(B)
        assert self.settled is not None
        return self.settled

    def answer(self, peer: PeerId, *committed: StepKey, in_doubt: tuple[StepKey, ...] = ()) -> None:
        assert self.fencing.receive(Received(peer, Fenced({1: 2}, committed, in_doubt, 3, {}, steady=True), ()))


async def asked(replica: MemoryEndpoint) -> Fence:
    async for event in replica.events():
        if isinstance(event, Received) and isinstance(event.message, Fence):
            return event.message
    raise AssertionError("nothing was asked")


async def test_every_live_replica_is_asked_and_their_answers_are_joined() -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.settle)
        assert await asked(desk.replicas[A]) == await asked(desk.replicas[B]) == Fence({1: 2})
        desk.answer(A, KEY, OTHER)
        await anyio.wait_all_tasks_blocked()
        assert desk.settled is None
        desk.answer(B, LATER)
    assert desk.settled == Settled(3, frozenset({KEY, LATER}), frozenset(), {}, complete=True)


async def test_a_replica_in_doubt_is_asked_again() -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.settle)
        await asked(desk.replicas[A])
        desk.answer(A, in_doubt=(KEY,))
        desk.answer(B)
        await asked(desk.replicas[A])
        desk.answer(A, KEY)
    assert desk.settled == Settled(3, frozenset({KEY}), frozenset(), {}, complete=True)


async def test_doubt_that_stays_is_left_to_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_DOUBT_S", 0.0)
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.settle)
        await anyio.wait_all_tasks_blocked()
        desk.answer(A, in_doubt=(KEY,))
        desk.answer(B)
    assert desk.settled == Settled(3, frozenset(), frozenset({KEY}), {}, complete=True)


async def test_a_replica_that_is_lost_meanwhile_is_not_waited_for_and_does_not_count_as_settled() -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.settle)
        await anyio.wait_all_tasks_blocked()
        desk.answer(A, KEY)
        await anyio.wait_all_tasks_blocked()
        desk.membership.view = desk.membership.view.without([B])
        desk.fencing.peer_lost(B)
    assert desk.settled == Settled(3, frozenset({KEY}), frozenset(), {}, complete=False)


async def test_a_silent_replica_leaves_the_answer_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.settle)
        await anyio.wait_all_tasks_blocked()
        desk.answer(A, KEY)
        monkeypatch.setattr(takeover, "_SILENCE_S", 0.0)
    assert desk.settled is not None
    assert not desk.settled.complete
    assert desk.settled.committed == {KEY}


async def test_without_any_replica_in_reach_nothing_is_waited_for_and_nothing_is_settled() -> None:
    desk = Desk()
    desk.membership.view = SwarmView()
    await desk.settle()
    assert desk.settled == Settled(3, frozenset(), frozenset(), {}, complete=False)


async def test_who_was_there_when_the_round_began_and_was_not_lost_since_would_know_of_every_attempt() -> None:
    desk = Desk()
    desk.fencing.begin_round(3, {A, B}, {A, B})
    desk.fencing.peer_lost(B)
    settled = await desk.answered_by_all()
    assert settled.denies(KEY, (A,))
    assert not settled.denies(KEY, (B,)), "what answers now may have been started since"


async def test_a_client_that_was_started_again_does_not_know_who_has_been_there_since_the_round_began() -> None:
    desk = Desk()
    desk.fencing.begin_round(3, None, ())
    settled = await desk.answered_by_all()
    assert not settled.denies(KEY, (A, B))
    assert not settled.complete, "nor whom trainers were told of"


async def test_a_replica_that_came_in_during_the_round_and_is_cut_off_since_may_have_committed() -> None:
    desk = Desk()
    desk.named.add(PeerId("came in"))
    settled = await desk.answered_by_all()
    assert not settled.complete
