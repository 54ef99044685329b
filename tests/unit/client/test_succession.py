"""When a client that waits believes that it is its turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from tests.alongside import until
from tests.unit.client.noted import NotedLedger

from shoal.client.diary import Saved
from shoal.client.run_driver import RunDriver
from shoal.client.succession import Succession
from shoal.client.totals import RunTotals
from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import ClientRecord, Record, RunRecord, StageRecord, VerifiedRecord
from shoal.control.run_question import RunTeller
from shoal.errors import ControlError
from shoal.ids import PeerId
from shoal.swarm import client_turn
from shoal.swarm.client_turn import ClientTurn
from shoal.swarm.round_boundary import RunTime
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import RunRules
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import SwarmView
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import RunOver

ME, FIRST, SCOUT = PeerId("me"), PeerId("first"), PeerId("scout")
RUN = RunRecord("run", 2, 1.0)
TRAINS = ClientRecord(("memory:first",), 9e9)


class Server:
    """Says who its client is."""

    def __init__(self, endpoint: MemoryEndpoint, client: PeerId | None) -> None:
        self.endpoint, self.client, self.asked = endpoint, client, 0
        self.teller = RunTeller(endpoint, {}, self._tell)

    def _tell(self) -> PeerId | None:
        self.asked += 1
        return self.client


class Waiting:
    """A client that waits, and what it hears."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.network = MemoryNetwork()
        self.endpoint = self.network.endpoint(ME)
        self.first = self.network.endpoint(FIRST)
        self.membership = Membership(SystemClock())
        self.ledger = NotedLedger()
        self.notices = self.ledger.said
        self.turn: list[bool] = []
        stand_in: Any = SimpleNamespace
        turn = ClientTurn(ME, "run")
        rules = RunRules(
            num_stages=2,
            num_rounds=1,
            total_steps=1,
            steps_of=lambda _: StepRange(0, 1),
            expected_servers=0,
            servers_timeout_s=1.0,
            averaging_timeout_s=1.0,
            first_deadline_s=1.0,
            succeeds=True,
        )
        self.run = RunClient(rules, TrainerSlots(start_timeout_s=1.0), RunTime(), turn=turn)
        self.succession = Succession(
            self.run,
            turn,
            run_id="run",
            endpoint=self.endpoint,
            membership=self.membership,
            clock=SystemClock(),
            coordinator=stand_in(leads=False),
            diary=stand_in(saved=Saved("run", RunTotals())),
            succeeds=True,
        )
        self.driver = RunDriver(
            self.run,
            stand_in_facts(self.membership),
            succession=self.succession,
            membership=self.membership,
            reassignment=stand_in(),
            trainers=stand_in(),
            begin=stand_in(),
            records=stand_in(write_last=anyio.lowlevel.checkpoint),
            ledger=self.ledger,
            saving=stand_in(),
            turn_taken=stand_in(begin=self.begin),
            changes=(self.membership.changed, self.succession.changed.wait),
        )
        self._sequence = 0
        self.hear(ME, "client", ClientRecord(("memory:me",), 1.0, waits=True))

    def hear(self, peer: PeerId, topic: str, record: Record) -> None:
        self._sequence += 1
        expires_unix_s = SystemClock().unix_s() + 1000
        self.membership.update([VerifiedRecord(topic, peer, self._sequence, expires_unix_s, record)])

    def serve(self, client: PeerId | None, name: str = "server", answers: anyio.Event | None = None) -> Server:
        """Have a server announce itself that is connected with this client; it may have to be allowed to answer."""
        server = Server(self.network.endpoint(PeerId(name)), client)

        async def answer() -> None:
            if answers is not None:
                await answers.wait()
            await dispatch(server.endpoint, (server.teller,))

        self._tasks.start_soon(answer)
        self.hear(PeerId(name), "stage.0", StageRecord((f"memory:{name}",), 1.0, stage=0))
        return server

    async def begin(self, _: TaskGroup) -> None:
        self.ends.cancel()
        await anyio.lowlevel.checkpoint()

    async def wait(self) -> None:
        with anyio.CancelScope() as waiting:
            self.ends = waiting
            await self.driver.run()
        self.turn.append(self.run.has_turn)

    async def events(self) -> None:
        async for event in self.endpoint.events():
            match event:
                case PeerUp(peer):
                    self.membership.found(peer)
                    self.succession.peer_up(peer)
                case PeerLost(peer):
                    self.membership.lost(peer)
                    self.succession.peer_lost(peer)
                case Received():
                    self.succession.receive(event)


def stand_in_facts(membership: Membership) -> Any:
    class Facts:
        stuck = ()

        @property
        def view(self) -> SwarmView:
            return membership.view

    return Facts()


@asynccontextmanager
async def waiting() -> AsyncIterator[Waiting]:
    async with anyio.create_task_group() as tasks:
        made = Waiting(tasks)
        tasks.start_soon(made.events)
        tasks.start_soon(made.wait)
        await anyio.wait_all_tasks_blocked()
        yield made
        await until(lambda: made.turn)
        tasks.cancel_scope.cancel()


async def test_it_is_no_turn_while_only_parts_of_the_registry_are_known() -> None:
    async with waiting() as found:
        assert not found.turn, "nothing is known"
        found.hear(FIRST, "run", RUN)
        await anyio.wait_all_tasks_blocked()
        assert not found.turn, "somebody announces the run, who has not been dialled"
        found.hear(FIRST, "client", TRAINS)
        await anyio.wait_all_tasks_blocked()
        assert not found.turn
        assert "has a client, client@unnamed#first" in found.notices[0]
        found.network.kill(FIRST)
    assert found.turn == [True]


@pytest.mark.parametrize("of_server", [None, ME], ids=["no client", "an earlier start of this one"])
async def test_what_hosts_of_servers_keep_counts_when_servers_say_that_they_have_no_client(
    of_server: PeerId | None,
) -> None:
    async with waiting() as found:
        found.hear(SCOUT, "run", RunRecord("run", 2, 1.0, kept=True))
        await anyio.wait_all_tasks_blocked()
        assert not found.turn, "that no client announces the run is the registry's word alone"
        found.serve(of_server)
    assert found.turn == [True]
    assert [notice.partition(": ")[2] for notice in found.notices] == ["this client takes its place"] * (not of_server)


async def test_a_client_that_a_server_is_connected_with_keeps_its_place_whatever_the_registry_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_turn, "ASK_AGAIN_S", 0.01)
    async with waiting() as found:
        found.hear(SCOUT, "run", RunRecord("run", 2, 1.0, kept=True))
        server = found.serve(PeerId("hidden"))
        await until(lambda: server.asked >= 3)
        assert not found.turn
        server.client = None
    assert found.turn == [True]


async def test_a_server_that_has_lost_the_client_decides_nothing_before_the_others_have_answered() -> None:
    others = anyio.Event()
    async with waiting() as found:
        servers = [found.serve(None, "cut off"), *(found.serve(FIRST, name, others) for name in ("one", "two"))]
        found.hear(SCOUT, "run", RunRecord("run", 2, 1.0, kept=True))
        await anyio.wait_all_tasks_blocked()
        assert [server.asked for server in servers] == [1, 0, 0]
        assert not found.turn
        others.set()
        await anyio.wait_all_tasks_blocked()
        assert [server.asked for server in servers] == [1, 1, 1]
        assert not found.turn
        for server in servers[1:]:
            found.network.kill(server.endpoint.peer_id)
    assert found.turn == [True]


async def test_a_client_that_waits_does_not_end_because_the_registry_says_that_the_run_has() -> None:
    async with waiting() as found:
        found.hear(FIRST, "run", RunRecord("run", 2, 1.0, ended=True))
        found.hear(FIRST, "client", TRAINS)
        await anyio.wait_all_tasks_blocked()
        assert not found.turn
        found.network.kill(FIRST)
    assert found.turn == [True]


async def test_the_run_ends_for_those_that_wait_as_well() -> None:
    async with waiting() as found:
        found.hear(FIRST, "run", RUN)
        found.hear(FIRST, "client", TRAINS)
        await anyio.wait_all_tasks_blocked()
        found.first.introduce(found.endpoint.hop)
        found.first.post(ME, RunOver(False, ""))
    assert found.turn == [False]
    assert found.notices[-1] == "run run has ended"


async def _hear_of_failure() -> None:
    async with waiting() as found:
        found.hear(FIRST, "run", RUN)
        found.hear(FIRST, "client", TRAINS)
        await anyio.wait_all_tasks_blocked()
        found.first.introduce(found.endpoint.hop)
        found.first.post(ME, RunOver(False, "no disk"))


async def test_a_run_that_has_failed_is_an_error_for_those_that_wait() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await _hear_of_failure()
    assert raised.group_contains(ControlError, match="run run has failed: no disk")
