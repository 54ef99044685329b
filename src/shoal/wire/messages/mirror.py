"""Between the coordinator (a client) and the mirrors (docs/protocol.md, "Mirrors").

coordinator                          mirror
  | -- Follow (record) ------------->  |   which record stands, repeated until answered
  | <- Mirrored                        |   what it holds, at once and whenever it holds more
  | <- StaleBallot                     |   and then that it follows a client of a higher ballot
  | -- RunCounts ------------------->  |   when the round after the record begins, or later, once it has answered;
  |                                    |   at the end of the run once more
  | <- LastKept                        |   then: a checkpoint of it is written, or what it lacks

A mirror fetches states, and gives them, as replicas do (`transfer`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.ids import MAX_STAGES, Ballot, Stage
from shoal.wire.messages.base import Struct
from shoal.wire.messages.round import SignedRecord


class Follow(Struct, frozen=True, tag="follow"):
    """The sender coordinates under `ballot`, and `record` stands: it is committed. Without one the sender only asks:
    D_0 stands, or the sender does not know yet what does. `instead_of` is the hash of a record of which the mirror
    holds bytes, if that is of another chain, which was not chosen: then that chain is left for this one."""

    ballot: Ballot
    record: SignedRecord | None
    instead_of: str = ""


class HeldRecord(Struct, frozen=True):
    """A committed record, and the stages whose bytes the sender holds as this record names them."""

    record: SignedRecord
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(max_length=MAX_STAGES)]


class Mirrored(Struct, frozen=True, tag="mirrored"):
    """All that a mirror holds, each stage once; to the client of the highest ballot that it has heard of."""

    ballot: Ballot
    held: tuple[HeldRecord, ...]


class RunCounts(Struct, frozen=True, tag="run_counts"):
    """What a checkpoint of a record has beside states: D_0, as the file of the sender has it, and what the sender has
    counted until it began the round after the record. With `is_last` no record follows: the run ends, and a checkpoint
    of this one is wanted before servers leave."""

    record_hash: str
    genesis: bytes
    counted: bytes
    is_last: bool = False


class LastKept(Struct, frozen=True, tag="last_kept"):
    """A checkpoint of the last record is written, or will not be. `lacks` says in words what is missing; empty:
    nothing."""

    record_hash: str
    lacks: str = ""


MirrorMessage = Follow | Mirrored | RunCounts | LastKept
