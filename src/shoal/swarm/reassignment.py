"""Which server moves to another stage: a rule that everybody computes alike from the same view.

A stage is as strong as it has servers, and the weakest stage is as fast as the whole swarm. A move is worth it if it
makes the weakest stage stronger by more than `MIN_GAIN`. Where several stages are the weakest together, or nearly so,
one move alone cannot do that; then a series is planned whose last move does it, and the first of it is made. As the
last one is worth it by itself, what is planned is also finished: after each move the rest of the series is the same as
before. Each move leaves its donor's stage stronger than the other one was before. So moves make the order of strengths,
weakest first, strictly better: without new events they come to an end and never undo each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.ids import PeerId
from shoal.swarm.assignment import assign
from shoal.swarm.view import Replica, SwarmView

MIN_GAIN = 0.1
"""Of the swarm's throughput: what a move has to bring, since loading a state costs something too."""


class StageMove(NamedTuple):
    """A server goes from one stage to another; `urgent` if that one has nobody."""

    peer: PeerId
    origin: int
    stage: int
    urgent: bool


@dataclass(frozen=True)
class _Place:
    """A server and the stage that it is counted for; `may_go` if it can be a donor."""

    peer: PeerId
    stage: int
    seniority: tuple[float, PeerId]
    holds: bool
    may_go: bool


def next_move(
    view: SwarmView,
    num_stages: int,
    holders: Collection[PeerId],
    exempt: Collection[PeerId] = (),
) -> StageMove | None:
    """Return the move that helps most, or None if none helps enough.

    The neediest stage gets a server of the strongest one that can spare one (largest surplus), the youngest there. The
    last holder of a stage never goes, nor a server that was given its stage by its user. A candidate counts for the
    stage that it will take, a server that is still loading for the stage that it loads. Whether the stage fits the
    server's memory only it knows: it refuses then, and is `exempt` the next time.

    Args:
        view: the servers, at the stages that they serve.
        holders: the replicas that hold the record that stands; only these are sent.
    """
    places = _places(view, num_stages, holders, exempt)
    weakest = min(_strengths(places, num_stages))
    first: StageMove | None = None
    for _ in range(num_stages):
        move = _best(places, num_stages)
        if move is None:
            return None
        first = first or move
        places = [replace(p, stage=move.stage, holds=False, may_go=False) if p.peer == move.peer else p for p in places]
        before, weakest = weakest, min(_strengths(places, num_stages))
        if weakest > before * (1 + MIN_GAIN):
            return first
    return None


def _places(
    view: SwarmView,
    num_stages: int,
    holders: Collection[PeerId],
    exempt: Collection[PeerId],
) -> list[_Place]:
    replicas = [replica for replica in view.replicas if replica.stage < num_stages]

    def place(replica: Replica) -> _Place:
        holds = replica.peer in holders
        may_go = holds and not replica.pinned and replica.peer not in exempt
        return _Place(replica.peer, replica.stage, replica.seniority, holds=holds, may_go=may_go)

    chosen = assign(view, num_stages)
    newcomers = [
        _Place(c.peer, chosen[c.peer], c.seniority, holds=False, may_go=False)
        for c in view.candidates
        if c.peer in chosen
    ]
    return [*map(place, replicas), *newcomers]


def _strengths(places: Sequence[_Place], num_stages: int) -> list[int]:
    strengths = [0] * num_stages
    for each in places:
        strengths[each.stage] += 1
    return strengths


def _best(places: Sequence[_Place], num_stages: int) -> StageMove | None:
    strengths = _strengths(places, num_stages)
    target = min(range(num_stages), key=lambda stage: (strengths[stage], stage))
    num_holders = [sum(each.holds for each in places if each.stage == stage) for stage in range(num_stages)]
    donors = [
        each
        for each in places
        if each.may_go and num_holders[each.stage] > 1 and strengths[each.stage] - 1 > strengths[target]
    ]
    if not donors:
        return None
    donor = max(donors, key=lambda each: (strengths[each.stage], -each.stage, each.seniority))
    return StageMove(donor.peer, donor.stage, target, strengths[target] == 0)
