"""Snapshots of replicas, kept by servers of other stages (docs/protocol.md, "Snapshots").

owner                                buddy, of another stage
  | -- OfferSnapshot -------------->  |   every `diloco.snapshot_every_steps` commits
  | <- TakeSnapshot / NoSnapshot      |
  | -- SnapshotChunk -------------->  |   one after the other
  | <- SnapshotKept / NoSnapshot      |   it has the hash that was said: the one before is dropped

the owner, started again             the same buddy
  | -- AskSnapshot ---------------->  |
  | <- OfferSnapshot / NoSnapshot     |
  | -- TakeSnapshot --------------->  |
  | <- SnapshotChunk                  |
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.ids import PeerId
from shoal.wire.messages.base import Struct
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.step import StepEntry


class Snapshot(Struct, frozen=True):
    """A replica at the boundary after the steps of `log`: `generation` counts the replicas that `peer` has been. It
    trained from the state of record `round`, which has these hashes. Its content is `num_bytes` long, with this SHA-256
    (hex): parameters, buffers and the inner optimizer's state."""

    peer: PeerId
    stage: int
    generation: int
    round: int
    record_hash: str
    hashes: StageHashes
    log: tuple[StepEntry, ...]
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]
    digest: str


class OfferSnapshot(Struct, frozen=True, tag="offer_snapshot"):
    """An encoded `Snapshot`, whose content the sender has. `seal` is the owner's: nobody else can make or check it."""

    body: bytes
    seal: bytes


class TakeSnapshot(Struct, frozen=True, tag="take_snapshot"):
    """Send the content with this hash."""

    digest: str


class NoSnapshot(Struct, frozen=True, tag="no_snapshot"):
    """The content with this hash is not wanted, or was not what it should be; in answer to AskSnapshot, with an empty
    hash: there is none."""

    digest: str
    reason: str


class SnapshotChunk(Struct, frozen=True, tag="snapshot_chunk"):
    """The next part of a content. One tensor of bytes."""

    digest: str


class SnapshotKept(Struct, frozen=True, tag="snapshot_kept"):
    """The sender has the whole content, and keeps it until a newer one comes or the round's record is there."""

    digest: str


class AskSnapshot(Struct, frozen=True, tag="ask_snapshot"):
    """Does the receiver keep a snapshot of the sender's earlier generation of this number, at this stage?"""

    stage: int
    generation: int


SnapshotMessage = OfferSnapshot | TakeSnapshot | NoSnapshot | SnapshotChunk | SnapshotKept | AskSnapshot
