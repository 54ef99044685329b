"""Chains of records: which record came before which, and where two chains have parted. Pure functions.

    D_1 (ballot a) -- D_2 (a) -- D_3 (a) -- D_4 (a)          one side of a split
                          '----- D_3'(b) -- D_4'(b)          the other one

A record names only the one before it by its hash; of all earlier ones it says by which ballots they were committed.
Under one ballot one coordinator commits one record of a round, so that tells whether an older record is one of them.
(Unless its commit reaches a member that was cut off while it was prepared, when the others have gone on without that
member; such a record looks older than theirs, and loses to it, as it would by its number of samples.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.ids import Ballot
from shoal.swarm.records import Tip, used_samples
from shoal.swarm.sample_ranges import count
from shoal.wire.messages.round import Record, SignedRecord

Unseal = Callable[[SignedRecord], Record]


def is_before(tip: Tip, head: Tip, unseal: Unseal) -> bool:
    """Whether `tip` is one of the records before `head`; D_0 is before all."""
    if tip.signed is None or head.signed is None:
        return tip.signed is None and head.signed is not None
    record = unseal(head.signed)
    if record.round <= tip.round:
        return False
    if record.round == tip.round + 1:
        return record.previous == tip.hash
    return _ballot_of(record, tip.round) == unseal(tip.signed).ballot


def heads(tips: Iterable[Tip], unseal: Unseal) -> list[Tip]:
    """The newest record of each chain among these: those that are before no other one."""
    all_tips = set(tips)
    return [tip for tip in all_tips if not any(is_before(tip, other, unseal) for other in all_tips)]


def num_samples(tip: Tip, unseal: Unseal) -> int:
    """How many samples a chain has recorded, skipped ones included."""
    return 0 if tip.signed is None else count(used_samples(unseal(tip.signed)))


def parted_after(one: Record, other: Record) -> int:
    """The last round that two chains have in common; 0 for D_0."""
    last = min(one.round, other.round)
    begins = sorted(era.round for era in (*one.eras, *other.eras) if 0 < era.round <= last)
    return next((r - 1 for r in begins if _ballot_of(one, r) != _ballot_of(other, r)), last - 1)


def _ballot_of(record: Record, round: int) -> Ballot | None:
    """The ballot under which a chain's record of a round was committed."""
    return next((era.ballot for era in reversed(record.eras) if era.round <= round), None)
