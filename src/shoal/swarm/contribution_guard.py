"""What each member's pseudo-gradient counts in the average of its stage: as it is, clipped, or not at all.

One member whose parameters have gone wrong would carry all replicas of its stage away. So each joins with the length of
its pseudo-gradient, and the coordinator says in the quorum by what each multiplies its own before it is averaged:

    not finite (also a buffer)                     0: its weight is 0, and it takes the others' average for its own
    more than `max_ratio` times the usual length   limit / length: it points where it pointed, and is as long as allowed
    else                                           1, without an operation: the bits are those of a round without guard

A pseudo-gradient of k steps is between sqrt(k) (steps in all directions) and k times (all in one) as long as that of
one step. Lengths are compared after division by sqrt(k): whoever has trained more, or came late, is out of bounds with
a ratio of 10 only if it has done more than 100 times the steps of others. Samples do not matter: gradients are means.

The usual length is the upper median over those that have trained: more than half of them are no longer than that. With
fewer than three there is no majority to say who is right, and nothing is clipped.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import NamedTuple

from shoal.ids import PeerId
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.wire.messages.round import Join, Record

MIN_TRAINED = 3
"""Members that have trained, below which nothing is clipped."""


class Suspicion(enum.StrEnum):
    """Why a record names a replica."""

    NOT_FINITE = "not_finite"
    CLIPPED = "clipped"
    DIFFERED = "differed"


class Suspect(NamedTuple):
    """A replica that a record names.

    Attributes:
        scale: the factor on its pseudo-gradient; 1 if `suspicion` is another one.
        is_member: it holds the record's bytes all the same.
    """

    stage: int
    peer: PeerId
    suspicion: Suspicion
    scale: float
    is_member: bool


def scales_of(joins: Mapping[PeerId, Join], max_ratio: float | None, cuts: CutRule = EVERY_STEP) -> dict[PeerId, float]:
    """Return the factors on the pseudo-gradients of one stage; peers whose factor is 1 do not appear.

    Args:
        max_ratio: above 1; None clips none.
        cuts: which of its steps a pseudo-gradient is of.
    """
    trained = {peer: steps for peer, join in joins.items() if (steps := _num_steps(join, cuts))}
    # Who has trained behind its cut alone would lose that unsaid.
    is_cut = cuts.cut_after is not None
    moved = {peer for peer, join in joins.items() if _num_steps(join, EVERY_STEP)} if is_cut else trained.keys()
    broken = {peer for peer in moved if not 0 <= joins[peer].gradient_norm < math.inf}
    scales = dict.fromkeys(broken, 0.0)
    lengths = {peer: joins[peer].gradient_norm / math.sqrt(trained[peer]) for peer in trained.keys() - broken}
    if max_ratio is None or len(lengths) < MIN_TRAINED:
        return scales
    usual = sorted(lengths.values())[len(lengths) // 2]
    limit = max_ratio * usual
    # Where most have not moved at all there is no usual length.
    scales |= {peer: limit / length for peer, length in lengths.items() if length > limit > 0}
    return scales


def suspects(record: Record) -> list[Suspect]:
    """The replicas that a record names because their contribution or their bytes were not as they should be."""
    found: list[Suspect] = []
    for outcome in record.stages:
        for peer, scale in zip(outcome.members, outcome.scales, strict=False):
            if scale < 1:
                suspicion = Suspicion.CLIPPED if scale else Suspicion.NOT_FINITE
                found.append(Suspect(outcome.stage, peer, suspicion, scale, True))
        for peer in outcome.differed:
            found.append(Suspect(outcome.stage, peer, Suspicion.DIFFERED, 1.0, peer in outcome.members))
    return found


def _num_steps(join: Join, cuts: CutRule) -> int:
    """Steps that have changed what of the replica's parameters is averaged."""
    return cuts.brought(join.round, join.log, join.earlier).num_steps
