"""Which message tells that a process has reached which point."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.clock import SystemClock
from shoal.config.emulation import parse_death
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import seal
from shoal.transport.base import Received
from shoal.wire.messages import Message
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.feed import Lease
from shoal.wire.messages.round import CommitRecord, PrepareRecord, QuorumTag, Record, RecordPrepared
from shoal.wire.messages.step import Commit, Committed, Opened, Prepared
from shoal.wire.messages.transfer import Chunk, ContentKind, ContentName, Read
from shoal_lab.emulation.death_points import DeathPoints, DeathWatch, point_of
from shoal_lab.emulation.hooks import EmulatedRole

KEY = StepKey(0, 1, 42, 0)
BALLOT = Ballot(1, PeerId("C"), 1)
STATE, SNAPSHOT = (ContentName(kind, 0, "hash") for kind in (ContentKind.STATE, ContentKind.SNAPSHOT))
RECORD = seal(Record("run", 5, BALLOT, "0", (), (), (), {}), PeerId("C"), lambda _: b"")


@pytest.mark.parametrize(
    ("message", "point"),
    [
        (Commit(KEY, 1.0, 0.1, False), ("prepared", 42)),
        (Prepared(KEY, 0, 3, 1.0, True, None), ("prepared", 42)),
        (Opened(KEY), ("forward", 42)),
        (Committed(KEY), ("commit", 42)),
        (RingPart(QuorumTag(5, BALLOT, 1, 0).encoded(), 0, False, 0, 0, 0), ("ring", 5)),
        (PrepareRecord(BALLOT, RECORD), ("staged", 5)),
        (CommitRecord(BALLOT, RECORD), ("record", 5)),
        (RecordPrepared(BALLOT, 5, "hash"), ("prepared", 5)),
        (Lease(1, 0, 1, 3, 7), ("lease", 3)),
        (Heartbeat(), None),
    ],
)
def test_a_message_says_where_a_process_is(message: Message, point: tuple[str, int] | None) -> None:
    assert point_of(message) == point


@pytest.mark.parametrize(("point", "message"), [("fetch", Chunk(STATE, 0)), ("donate", Read(STATE, 0))])
def test_a_transfer_of_state_is_of_the_last_record_that_is_known(point: str, message: Message, tmp_path: Path) -> None:
    dead: list[str] = []
    points = DeathPoints([parse_death(f"server:0@{point}#5")], tmp_path, lambda: dead.append(point))
    watch = DeathWatch(points)
    watch.receive(Received(PeerId("D"), message, ()))
    assert not dead
    watch.receive(Received(PeerId("C"), CommitRecord(BALLOT, RECORD), ()))
    watch.receive(Received(PeerId("D"), type(message)(SNAPSHOT, 0), ()))
    assert not dead
    watch.receive(Received(PeerId("D"), message, ()))
    assert dead == [point]


def test_the_watch_takes_nothing_and_is_there_only_if_somebody_is_to_die(tmp_path: Path) -> None:
    dead: list[str] = []
    points = DeathPoints([parse_death("server:0@prepared#42")], tmp_path, lambda: dead.append("dead"))
    hooks = EmulatedRole(SystemClock(), deaths=points)
    (watch,) = hooks.handlers(())
    assert isinstance(watch, DeathWatch)
    assert not watch.receive(Received(PeerId("T"), Commit(KEY, 1.0, 0.1, False), ()))
    assert dead == ["dead"]
    assert hooks.handlers(()) == ()
    assert EmulatedRole(SystemClock()).handlers(()) == ()
