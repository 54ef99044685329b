"""What a client answers to servers that leave, and what it says it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.unit.checkpoint.checkpoints import open_record, signed_record
from tests.unit.client.noted import NotedLedger
from torch import nn

from shoal.checkpoint.model_layout import StageLayout
from shoal.client.keeping import Keeping
from shoal.config import load_config
from shoal.events.stages import StageNotKept
from shoal.ids import PeerId
from shoal.runtime import memory
from shoal.transport.base import Received
from shoal.wire.messages.control import Leave, MayLeave
from shoal.wire.messages.round import StageHashes

LAST, OTHER = PeerId("last"), PeerId("other")


class Desk:
    """A client whose coordinator knows what it is told here."""

    def __init__(self) -> None:
        self.stages = {LAST: 1, OTHER: 1}
        self.holders: dict[PeerId, int] | None = None
        self.standing: Any = None
        self.kept: dict[int, str | None] = {}
        self.changes = 0
        self.posted: list[MayLeave] = []
        config = load_config(None, {"model_pipeline": {"stages": 2}}, {})
        self.endpoint = self
        self.keeping = Keeping(config, self, self, self, NotedLedger(), self)  # type: ignore[arg-type]

    def post(self, peer: PeerId, message: MayLeave) -> None:
        assert peer == LAST
        self.posted.append(message)

    def leaves(self, peer: PeerId, stage: int) -> None:
        assert (peer, stage) == (LAST, 1)

    def keep(self, stage: int, record_hash: str | None) -> None:
        self.kept[stage] = record_hash

    async def changed(self) -> None:
        self.changes += 1
        if self.changes > 1:
            await anyio.sleep_forever()


async def test_while_it_does_not_know_what_stands_nobody_may_go() -> None:
    desk = Desk()
    desk.keeping.receive(Received(LAST, Leave(1)))
    [answer] = desk.posted
    assert not answer.is_safe
    assert answer.refused == "the client does not know yet what stands"
    desk.holders = {LAST: 1, OTHER: 1}
    desk.keeping.receive(Received(LAST, Leave(1)))
    assert desk.posted[-1].is_safe, "another one holds D_0, which all can compute"


async def test_who_leaves_with_the_sender_is_no_holder_that_stays() -> None:
    desk = Desk()
    desk.holders, desk.standing = {LAST: 1, OTHER: 1}, SimpleNamespace(record=SimpleNamespace(round=4), signed=None)
    assert desk.keeping._others_hold(1)
    desk.keeping._leaving[LAST] = Leave(1, (OTHER,))
    assert not desk.keeping._others_hold(1), "though it has not said so itself"


async def test_what_is_released_is_not_said_to_be_kept() -> None:
    desk = Desk()
    released: list[int] = []
    donor = SimpleNamespace(release=lambda: released.append(1))
    desk.keeping._kept[1] = SimpleNamespace(round=3, donor=donor)  # type: ignore[assignment]
    desk.keep(1, "digest")
    desk.holders, desk.standing = {OTHER: 1}, SimpleNamespace(record=SimpleNamespace(round=4))
    with anyio.move_on_after(0.2):
        await desk.keeping._drop_what_is_old()
    assert released == [1]
    assert desk.kept == {1: None}, "or the stage would never be restored once its servers are lost"


async def test_a_state_that_nobody_gives_or_that_does_not_fit_is_not_kept_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(*_: object) -> None:
        return None

    layout = StageLayout.of(nn.Linear(3, 2))
    signed = signed_record(4, [StageHashes("", "", "")] * 2)
    for free_bytes, reason in ((0, "no server gives its state after round 4"), (1, "of free memory, it needs")):
        monkeypatch.setattr(memory, "free_memory_bytes", lambda free_bytes=free_bytes: free_bytes)
        desk = Desk()
        desk.holders, desk.standing = {}, SimpleNamespace(record=open_record(signed), signed=signed)
        desk.keeping._layouts = [layout] * 2
        monkeypatch.setattr(desk.keeping, "fetch", SimpleNamespace(fetch=nothing))
        await desk.keeping._take_over(1)
        assert isinstance(desk.keeping.ledger, NotedLedger)
        [said] = desk.keeping.ledger.noted
        assert isinstance(said, StageNotKept)
        assert (said.stage, reason in said.reason) == (1, True)
