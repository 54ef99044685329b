"""Tells `DeathPoints` of the points that a process reaches when a message is here. For measurements only.

A `transport.dispatch.Handler` that takes no message: it only looks at them, so it comes first.
"""

from __future__ import annotations

import msgspec

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages import Message
from shoal.wire.messages.collective import RingPart, RingReady
from shoal.wire.messages.feed import Lease
from shoal.wire.messages.round import CommitRecord, PrepareRecord, QuorumTag, Record, RecordPrepared, SignedRecord
from shoal.wire.messages.step import Commit, Committed, Opened, Prepared
from shoal.wire.messages.transfer import Chunk, Read
from shoal_lab.emulation.death_points import DeathPoints


class DeathWatch:
    """Sees every message before the others do."""

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
                if isinstance(message, CommitRecord):
                    self._round = _round_of(message.record)
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
        case PrepareRecord(record=record):
            return "staged", _round_of(record)
        case CommitRecord(record=record):
            return "record", _round_of(record)
        case Lease(round=round):
            return "lease", round
        case _:
            return None


def _round_of(record: SignedRecord) -> int:
    return msgspec.msgpack.decode(record.body, type=Record).round
