"""What no handler takes, or what breaks a protocol: counted by kind, logged in few lines, and the others are heard."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import pytest
from tests.alongside import alongside, until

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.transport.base import PeerLost, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.control import RunOver, UpdateReplicas
from shoal.wire.messages.step import Opened, Refused

KEY = StepKey(0, 0, 1, 0)
ROLE, FRIEND, INSIDER = PeerId("role"), PeerId("friend"), PeerId("insider")


@dataclass
class Handler:
    """Takes `Opened`, and finds every `Refused` against the rules."""

    taken: list[PeerId] = field(default_factory=list[PeerId])
    lost: list[PeerId] = field(default_factory=list[PeerId])

    def receive(self, event: Received) -> bool:
        if isinstance(event.message, Refused):
            raise RemoteProtocolError("nobody asked")
        if isinstance(event.message, Opened):
            self.taken.append(event.peer)
        return isinstance(event.message, Opened)

    def peer_lost(self, peer: PeerId) -> None:
        self.lost.append(peer)


async def _after(message: Message, count: int) -> tuple[MemoryEndpoint, MemoryEndpoint, Handler]:
    """Return role, insider and handler once the insider has sent so many messages between two of a friend."""
    network = MemoryNetwork()
    role, friend, insider = (network.endpoint(peer) for peer in (ROLE, FRIEND, INSIDER))
    handler = Handler()
    friend.introduce(role.hop)
    insider.introduce(role.hop)
    friend.post(ROLE, Opened(KEY))
    for _ in range(count):
        insider.post(ROLE, message)
    friend.post(ROLE, Opened(KEY))
    async with alongside() as tasks:
        tasks.start_soon(dispatch, role, [handler])
        await until(lambda: len(handler.taken) >= 2)
        await anyio.wait_all_tasks_blocked()
    assert handler.taken == [FRIEND, FRIEND]
    return role, insider, handler


async def test_a_message_that_the_role_never_takes_is_counted_and_nothing_else_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    role, _, handler = await _after(UpdateReplicas(()), 1000)
    assert role.metrics.counts() == {"protocol.unexpected{kind=UpdateReplicas}": 1000}
    lines = [vars(r) for r in caplog.records if r.getMessage() == "protocol.unexpected"]
    assert 1 <= len(lines) <= 5
    assert (lines[0]["peer"], lines[0]["kind"]) == (INSIDER, "UpdateReplicas")
    assert handler.lost == []


async def test_a_message_that_breaks_its_protocol_ends_the_connection_of_its_sender_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    role, insider, handler = await _after(Refused(KEY, "no"), 1)
    assert role.metrics.counts()["protocol.violated{kind=Refused}"] == 1
    [line] = [vars(r) for r in caplog.records if r.getMessage() == "protocol.violated"]
    assert (line["peer"], line["error"]) == (INSIDER, "nobody asked")
    assert handler.lost == [INSIDER]
    events = insider.events()
    assert [await anext(events) for _ in range(2)][1] == PeerLost(ROLE, "nobody asked")


async def test_a_client_that_says_that_the_run_is_over_is_not_looked_for_by_any_role(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="shoal")
    role, insider, handler = await _after(RunOver(False, ""), 1)
    assert not role.metrics.counts()
    async with alongside() as tasks:
        tasks.start_soon(dispatch, role, [handler])
        await insider.aclose()
        await anyio.wait_all_tasks_blocked()
        role.post(INSIDER, Opened(KEY))
        await anyio.wait_all_tasks_blocked()
    assert handler.lost == [INSIDER]
    assert role.metrics.counts() == {"transport.dropped": 1, "transport.lost{cause=closed}": 1}
    assert [r.getMessage() for r in caplog.records if "lost" in r.getMessage()] == ["transport.lost"], "once"
