"""Copies of replicas that are kept by servers of other stages (docs/protocol.md, "Snapshots").

owner                                buddy, of another stage
  | -- OfferSnapshot -------------->  |   every `diloco.snapshot_every_steps` commits
  |                                   |   gets the content (`transfer`)
  | <- SnapshotKept / NoSnapshot      |   it is whole: the one before is dropped

the owner, started again             the same buddy
  | -- AskSnapshot ---------------->  |
  | <- OfferSnapshot / NoSnapshot     |
  |    gets the content (`transfer`)  |
"""

from __future__ import annotations

from shoal.ids import Ordinal, PeerId, Stage
from shoal.wire.messages.base import ContentBytes, Struct
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.step import Earlier, StepEntry
from shoal.wire.messages.transfer import ContentKind, ContentName, Digest


class Snapshot(Struct, frozen=True):
    """A replica at the boundary after the steps of `log`: `generation` counts the replicas that `peer` has been. It
    trained from the state of record `round`, which has these hashes. Its content is `num_bytes` long: parameters,
    buffers and the inner optimizer's state. `digest` (hex) is the SHA-256 of the SHA-256 of its chunks. `earlier` is
    what the replica has trained in earlier rounds of which some fragment is still to be averaged."""

    peer: PeerId
    stage: Stage
    generation: Ordinal
    round: Ordinal
    record_hash: str
    hashes: StageHashes
    log: tuple[StepEntry, ...]
    num_bytes: ContentBytes
    digest: Digest
    earlier: Earlier = ()

    @property
    def name(self) -> ContentName:
        """Of its content."""
        return ContentName(ContentKind.SNAPSHOT, self.stage, self.digest)


class OfferSnapshot(Struct, frozen=True, tag="offer_snapshot"):
    """An encoded `Snapshot`, whose content the sender has. `seal` is the owner's: nobody else can make or check it."""

    body: bytes
    seal: bytes


class NoSnapshot(Struct, frozen=True, tag="no_snapshot"):
    """The content with this hash is not kept here; in answer to AskSnapshot, with an empty hash: there is none."""

    digest: str
    reason: str


class SnapshotKept(Struct, frozen=True, tag="snapshot_kept"):
    """The sender has the whole content, and keeps it until a newer one comes or the round's record is there."""

    digest: str


class AskSnapshot(Struct, frozen=True, tag="ask_snapshot"):
    """Does the receiver keep a snapshot of the sender's earlier generation of this number, at this stage?"""

    stage: Stage
    generation: int


SnapshotMessage = OfferSnapshot | NoSnapshot | SnapshotKept | AskSnapshot
