"""A client that ends waits for the checkpoint of its last record, and for nothing that does not come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from tests.alongside import until
from tests.unit.client.noted import NotedLedger

from shoal.client import checkpoints
from shoal.client.checkpoints import LastCheckpoint
from shoal.events.mirror import LastCheckpointAwaited, LastCheckpointLacks
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.mirror import LastKept, RunCounts

ONE, OTHER = PeerId("one"), PeerId("other")
COUNTS = RunCounts("record", b"{}", b"{}")


def _counts(*, is_last: bool) -> RunCounts:
    return msgspec.structs.replace(COUNTS, is_last=is_last)


class Desk:
    """A client that ends, with these mirrors."""

    def __init__(self, *mirrors: PeerId) -> None:
        self.posted: list[tuple[PeerId, object]] = []
        self.view = SimpleNamespace(mirrors=[SimpleNamespace(peer=peer) for peer in mirrors])
        self.standing: Any = SimpleNamespace(record=SimpleNamespace(round=7))
        self.holders: Any = {}
        self.has_swapped = anyio.Event()
        self.has_swapped.set()
        self.ledger = NotedLedger()
        parts: Any = self
        stand_in: Any = SimpleNamespace
        self.last = LastCheckpoint(parts, parts, parts, self.ledger, stand_in(standing=_counts))

    def post(self, peer: PeerId, message: object) -> None:
        self.posted.append((peer, message))

    async def swapped(self) -> None:
        await self.has_swapped.wait()

    def said(self, peer: PeerId, lacks: str = "") -> None:
        assert self.last.receive(Received(peer, LastKept("record", lacks)))

    @property
    def noted(self) -> list[str]:
        return [each.lacks for each in self.ledger.noted if isinstance(each, LastCheckpointLacks)]


async def test_every_mirror_is_asked_and_waited_for() -> None:
    desk = Desk(ONE, OTHER)
    ended: list[int] = []

    async def end() -> None:
        await desk.last.left()
        ended.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        await until(lambda: len(desk.posted) == 2)
        assert {peer for peer, message in desk.posted if message == _counts(is_last=True)} == {ONE, OTHER}
        desk.said(ONE)
        desk.said(PeerId("nobody"), "is none of the mirrors")
        await anyio.lowlevel.checkpoint()
        assert ended == []
        desk.said(OTHER)
    assert (ended, desk.ledger.noted) == ([1], [])


async def test_a_mirror_that_is_lost_or_lacks_something_holds_nothing_up_and_is_said() -> None:
    desk = Desk(ONE, OTHER)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.last.left)
        await until(lambda: len(desk.posted) == 2)
        desk.last.peer_lost(PeerId("server"))
        desk.last.peer_lost(ONE)
        desk.said(OTHER, "it lacks this")
    assert desk.noted == ["its mirror was lost before it was written", "it lacks this"]


async def test_a_mirror_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SAY_AFTER_S", 0.0)
    monkeypatch.setattr(checkpoints, "_MOST_S", 0.05)
    desk = Desk(ONE)
    await desk.last.left()
    assert [type(each) for each in desk.ledger.noted] == [LastCheckpointAwaited, LastCheckpointLacks]
    assert desk.noted == ["its mirror has said nothing for 0.05 s"]


async def test_without_a_record_a_lead_or_a_mirror_there_is_nothing_to_wait_for() -> None:
    nothing, leads_not, alone = Desk(ONE), Desk(ONE), Desk()
    nothing.standing, leads_not.holders = None, None
    for desk in (nothing, leads_not, alone):
        await desk.last.left()
        assert (desk.posted, desk.ledger.noted) == ([], [])


async def test_a_record_that_was_just_committed_is_the_last_once_a_server_has_swapped_to_it() -> None:
    desk = Desk(ONE)
    desk.has_swapped = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.last.left)
        await anyio.lowlevel.checkpoint()
        assert desk.posted == []
        desk.has_swapped.set()
        await until(lambda: desk.posted)
        desk.said(ONE)
