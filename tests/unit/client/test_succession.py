"""When a client that waits believes that it is its turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from shoal.client.succession import Succession
from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import ClientRecord, Opened, Record, RunRecord
from shoal.errors import ControlError
from shoal.ids import PeerId
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages.control import RunOver

pytestmark = pytest.mark.anyio

ME, FIRST, SCOUT = PeerId("me"), PeerId("first"), PeerId("scout")
RUN = RunRecord("run", 2, 1.0)
TRAINS = ClientRecord(("memory:first",), 9e9)


class Waiting:
    """A client that waits, and what it hears."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.endpoint = self.network.endpoint(ME)
        self.first = self.network.endpoint(FIRST)
        self.membership = Membership(SystemClock())
        self.notices: list[str] = []
        self.turn: list[bool] = []
        self.succession = Succession(
            run_id="run",
            endpoint=self.endpoint,
            membership=self.membership,
            clock=SystemClock(),
            leads=lambda: False,
            notice=self.notices.append,
        )
        self._sequence = 0
        self.hear(ME, "client", ClientRecord(("memory:me",), 1.0, waits=True))

    def hear(self, peer: PeerId, topic: str, record: Record) -> None:
        self._sequence += 1
        expires_unix_s = SystemClock().unix_s() + 1000
        self.membership.update([Opened(topic, peer, self._sequence, expires_unix_s, record)])

    async def wait(self) -> None:
        self.turn.append(await self.succession.turn())

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


@asynccontextmanager
async def waiting() -> AsyncIterator[Waiting]:
    made = Waiting()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.events)
            tasks.start_soon(made.wait)
            await anyio.wait_all_tasks_blocked()
            yield made
            while not made.turn:
                await anyio.lowlevel.checkpoint()
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
        assert "has a client, first" in found.notices[0]
        found.network.kill(FIRST)
    assert found.turn == [True]


async def test_what_hosts_of_servers_keep_shows_that_there_is_no_client() -> None:
    async with waiting() as found:
        found.hear(SCOUT, "run", RunRecord("run", 2, 1.0, kept=True))
    assert found.turn == [True]
    assert not found.notices


@pytest.mark.parametrize("by_word", [True, False])
async def test_the_run_ends_for_those_that_wait_as_well(by_word: bool) -> None:
    async with waiting() as found:
        found.hear(FIRST, "run", RUN)
        found.hear(FIRST, "client", TRAINS)
        await anyio.wait_all_tasks_blocked()
        if by_word:
            found.first.introduce(found.endpoint.hop)
            found.first.post(ME, RunOver(False, ""))
        else:
            found.hear(FIRST, "run", RunRecord("run", 2, 1.0, ended=True))
    assert found.turn == [False]
    assert found.notices[-1] == "run run has ended"


async def test_a_run_that_has_failed_is_an_error_for_those_that_wait() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with waiting() as found:
            found.hear(FIRST, "run", RunRecord("run", 2, 1.0, ended=True, failure="no disk"))
    assert raised.group_contains(ControlError, match="run run has failed: no disk")
