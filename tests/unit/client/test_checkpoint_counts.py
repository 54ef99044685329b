"""Each mirror is told once what a checkpoint of the record that stands has beside states, whenever it comes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.client.noted import NotedLedger

from shoal.client import checkpoints
from shoal.client.checkpoints import CheckpointCounts
from shoal.ids import NO_BALLOT, PeerId
from shoal.transport.base import Received
from shoal.wire.messages.mirror import Mirrored, RunCounts

ONE, OTHER = PeerId("one"), PeerId("other")


class Desk:
    """A client with one mirror, in whose round 3 another one comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoints, "genesis_file", lambda _: b"{}")
        self.told: list[tuple[PeerId, str]] = []
        self.view = SimpleNamespace(mirrors=[SimpleNamespace(peer=ONE)])
        self.record_hash = "D2"
        parts: Any = self
        self.counts = CheckpointCounts(parts, parts, parts, NotedLedger(), Path())

    def post(self, peer: PeerId, message: object) -> None:
        assert isinstance(message, RunCounts)
        self.told.append((peer, message.record_hash))

    def answers(self, peer: PeerId) -> list[tuple[PeerId, str]]:
        """Return who is told what when a mirror says what it holds; the coordinator is to hear of it as well."""
        self.told.clear()
        assert not self.counts.receive(Received(peer, Mirrored(NO_BALLOT, ())))
        return self.told


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_mirrors_that_are_there_are_told_when_a_round_begins(desk: Desk) -> None:
    desk.counts.tell_mirrors()
    assert desk.told == [(ONE, "D2")]
    assert desk.answers(ONE) == []


def test_one_that_comes_later_is_told_when_it_answers(desk: Desk) -> None:
    desk.counts.tell_mirrors()
    assert desk.answers(OTHER) == [(OTHER, "D2")]
    assert desk.answers(OTHER) == [], "it is told once"


def test_one_that_was_started_again_is_told_again(desk: Desk) -> None:
    desk.counts.tell_mirrors()
    desk.counts.peer_lost(ONE)
    assert desk.answers(ONE) == [(ONE, "D2")]


def test_between_a_record_and_the_round_after_it_nothing_is_counted_yet(desk: Desk) -> None:
    assert desk.answers(OTHER) == []
    desk.counts.tell_mirrors()
    desk.record_hash = "D3"
    desk.counts.peer_lost(ONE)
    assert desk.answers(ONE) == []


def test_no_round_after_the_first_depends_on_the_disk_that_has_the_run_s_beginning(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    desk.counts.tell_mirrors()
    monkeypatch.setattr(checkpoints, "genesis_file", fail)
    desk.record_hash = "D3"
    desk.counts.tell_mirrors()
    assert desk.told == [(ONE, "D2"), (ONE, "D3")]
