"""A client that resumes a run from a checkpoint: with which record it begins, and how long it keeps what it has read.

resumed --its coordinator knows the record and keeps every stage--> servers hold the record --a later one stands-->
    what they hold is kept no more --a round is begun on the later one--> another start is that of any client
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.ids import PeerId
from shoal.swarm.records import record_hash
from shoal.wire.messages.round import SignedRecord


def still_resumes(resumed: SignedRecord | None, base: str) -> SignedRecord | None:
    """The record with which another start of a client is to begin, though no replica may hold it; None: with none.

    Once the run has gone on, replicas and mirrors hold what is newer: to begin with the checkpoint while they cannot be
    heard would take the run back. And the checkpoint is removed when there are newer ones.

    Args:
        resumed: of the checkpoint with which this start has begun.
        base: hash of the record on which a round is begun.
    """
    return resumed if resumed is not None and record_hash(resumed) == base else None


def is_superseded(
    stage: int, kept_round: int, standing_round: int, holders: Mapping[PeerId, int], leaving: Collection[PeerId] = ()
) -> bool:
    """Whether a client need not keep what it has of a stage: a server that stays holds a newer record.

    Args:
        kept_round: of the record whose bytes are kept.
        standing_round: of the record that stands.
        holders: those that hold the record that stands, with their stages.
        leaving: those that may end soon.
    """
    return kept_round < standing_round and stays_held(stage, holders, leaving)


def stays_held(stage: int, holders: Mapping[PeerId, int], leaving: Collection[PeerId]) -> bool:
    """Whether a server that stays holds the record that stands. Arguments as of `is_superseded`."""
    return any(of == stage and peer not in leaving for peer, of in holders.items())
