"""A process that kills itself where it was told to: a fault at (process, step, point) instead of at a moment.

Each death happens once in a run, however often its process is started again: a file in the run's folder says that it
has happened. It is a kill -9 to itself, with the event `emulation.death` as the last line of its log.

    server        forward, backward, commit: the device has been given such an operation of the step
                  prepared: all replicas have prepared the step, and its Commit is here and not applied
                  ring: the first part of another member's sum is here; number is the round from here on
                  staged: it has staged the outer step and is asked to prepare the record
                  record: it has prepared the record, and learns that it is committed
                  swapped: the record's state is what it trains on
                  fetch: a newcomer has the first chunk of its state; donate: it is asked for one; number is the
                  round of the last record that it knows
    trainer       forward: the first replica has opened the step; prepared: the first one has prepared it, none has
                  been told to commit; commit: the first one has committed it
    data_server   lease: a trainer wants a batch of the round
    client        prepared: the first member has prepared the record of the round, none was told that it is committed
    mirror        of the checkpoint of a round: file: a part of its first file is written; sync: all of that file, not
                  forced to the disk; manifest: all files but this one are on the disk; rename: this one too; renamed:
                  it is in its place, and so are older ones; removal: an older one has lost its name, not its files
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shoal.config.emulation import Death
from shoal.events.base import emit
from shoal.events.processes import EmulatedDeath
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages import Message
from shoal.wire.messages.collective import RingPart, RingReady
from shoal.wire.messages.feed import Lease
from shoal.wire.messages.round import (
    CommitRecord,
    PrepareRecord,
    QuorumTag,
    Record,
    RecordName,
    RecordPrepared,
    SignedRecord,
)
from shoal.wire.messages.step import Commit, Committed, Opened, Prepared
from shoal.wire.messages.transfer import Chunk, Read

logger = logging.getLogger(__name__)


def kill_myself() -> None:
    """End this process as kill -9 from outside would."""
    os.kill(os.getpid(), signal.SIGKILL)


class DeathPoints:
    """The deaths of one process that have not happened yet."""

    def __init__(self, deaths: Sequence[Death], directory: Path, die: Callable[[], None] = kill_myself) -> None:
        """Look which of the deaths have happened.

        Args:
            directory: of the run; holds the marks of the deaths that have happened.
        """
        self._directory = directory
        self._left = [death for death in deaths if not self._mark(death).exists()]
        self._die = die

    def __bool__(self) -> bool:
        return bool(self._left)

    def reached(self, point: str, number: int) -> None:
        """The process is at a point in this step or round; it dies here if it was to do so in this one or before."""
        for death in [each for each in self._left if each.point == point and each.number <= number]:
            self._left.remove(death)
            try:
                self._mark(death).touch(exist_ok=False)
            except FileExistsError:
                continue  # it was another process's
            emit(logger, EmulatedDeath(point, death.number, number))
            self._die()

    def _mark(self, death: Death) -> Path:
        processes = "-".join(map(str, death.processes))
        return self._directory / f"{death.role}_{processes}.{death.point}.{death.number}.died"


class DeathWatch:
    """Sees every message before the others do: a `transport.dispatch.Handler` that takes none. For measurements."""

    def __init__(self, points: DeathPoints) -> None:
        self._points = points
        self._round = 0

    def receive(self, event: Received) -> bool:
        """Look at a message; takes nothing."""
        match event.message:
            # These carry no round: it is that of the last record which is known here.
            case Chunk(name) if name.kind.leads_to_record:
                self._points.reached("fetch", self._round)
            case Read(name) if name.kind.leads_to_record:
                self._points.reached("donate", self._round)
            case message:
                if (reached := point_of(message)) is not None:
                    self._points.reached(*reached)
                if isinstance(message, CommitRecord) and reached is not None:
                    self._round = reached[1]
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """Nobody dies of that."""


def point_of(message: Message) -> tuple[str, int] | None:
    """Return the point that a process has reached when this message is here, and the step or round."""
    match message:
        case Commit(key=key) | Prepared(key=key):
            return "prepared", key.number
        case Opened(key=key):
            return "forward", key.number
        case Committed(key=key):
            return "commit", key.number
        case RingPart(tag=tag) | RingReady(tag=tag):
            return "ring", QuorumTag.decoded(tag).round
        case RecordPrepared(round=round):
            return "prepared", round
        case PrepareRecord(record=record, base=base):
            return "staged", _round_of(record) if base is None else base.round + 1
        case CommitRecord(known=RecordName(round=round)):
            return "record", round
        case CommitRecord(record=SignedRecord() as record):
            return "record", _round_of(record)
        case Lease(round=round):
            return "lease", round
        case _:
            return None


def _round_of(record: SignedRecord) -> int:
    return msgspec.msgpack.decode(record.body, type=Record).round
