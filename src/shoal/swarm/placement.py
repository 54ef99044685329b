"""Which server goes to another stage: a rule that everybody computes alike from the same view.

What is better is said by `assignment.Crowd`, for who chooses a stage as for who is sent to another one: first, stages
have more nearly the same number of servers; then, fewer servers of one stage share a machine. A server goes where that
gets better by most; of several the youngest. So placements only become better: without new events moves come to an
end, and never undo each other.

Until something is trained a move costs nothing, and each that makes the placement better is made. Servers that start
together choose by what each sees of the others; on a slow machine too many may have taken one stage, or one machine has
all replicas of a stage. Where no server alone can make it better, two that change places can, and the first of them is
named: once it has moved, no single move is better than that of the other one.

Later a move has to make the weakest stage stronger by more than `MIN_GAIN`. Where several stages are the weakest
together, or nearly so, one move alone cannot do that; then a series is planned whose last move does it, and the first
of it is made. As the last one is worth it by itself, what is planned is also finished: after each move the rest of the
series is the same as before.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shoal.ids import PeerId
from shoal.swarm.assignment import Crowd, Crowds, assign
from shoal.swarm.view import Candidate, SwarmView

MIN_GAIN = 0.1
"""By so much the smallest stage has to grow, since loading a state costs something too."""


class StageMove(NamedTuple):
    """A server goes from one stage to another; `urgent` if that one has nobody."""

    peer: PeerId
    origin: int
    stage: int
    urgent: bool


# What a move changes is the difference between whom a server finds where it goes, and whom where it was.
_NOTHING = Crowd(0, 0)
_NO_STRONGER = Crowd(-1, sys.maxsize)
"""A move to a stage that is weaker also afterwards is better, whatever machines say, and no other one is."""


@dataclass(frozen=True)
class _Place:
    """A server and the stage that it is counted for; `may_go` if it can be a donor."""

    server: Candidate
    stage: int
    holds: bool = False
    may_go: bool = False

    @cached_property
    def hosts(self) -> frozenset[str]:
        return self.server.hosts


def improve(
    view: SwarmView,
    num_stages: int,
    holders: Collection[PeerId],
    exempt: Collection[PeerId] = (),
    *,
    trains: bool,
) -> StageMove | None:
    """Return the move that helps most, or None if none helps enough.

    The last holder of a stage never goes, nor a server that was given its stage by its user. A candidate counts for the
    stage that it will take, a server that is still loading for the stage that it loads. Whether the stage fits the
    server's memory only it knows: it refuses then, and is `exempt` the next time.

    Args:
        view: the servers, at the stages that they serve.
        holders: the replicas that can be reached and hold the record that stands; only these are sent.
        trains: something has been trained, so that a move costs something.
    """
    placement = _Placement(_places(view, num_stages, holders, exempt), num_stages)
    if not trains:
        return placement.best(_NOTHING) or placement.first_of_two()
    first: StageMove | None = None
    for _ in range(num_stages):
        move = placement.best(_NO_STRONGER)
        if move is None:
            return None
        first, weakest = first or move, placement.weakest
        placement = placement.after(move)
        if placement.weakest > weakest * (1 + MIN_GAIN):
            return first
    return None


def _places(view: SwarmView, num_stages: int, holders: Collection[PeerId], exempt: Collection[PeerId]) -> list[_Place]:
    """Return where servers stand, the youngest first."""
    chosen = assign(view, num_stages)
    places = [_Place(each, chosen[each.peer]) for each in view.candidates if each.peer in chosen]
    for each in view.replicas:
        if each.stage < num_stages:
            holds = each.peer in holders
            may_go = holds and not each.pinned and each.peer not in exempt
            places.append(_Place(each, each.stage, holds, may_go))
    return sorted(places, key=lambda place: place.server.seniority, reverse=True)


class _Placement:
    """All servers where they stand, or would stand."""

    def __init__(self, places: Sequence[_Place], num_stages: int) -> None:
        self._places = places
        self._crowds = Crowds(num_stages, ((place.server, place.stage) for place in places))
        # A stage keeps a replica that is there: one that is only expected may not come.
        num_holders = [sum(each.holds for each in places if each.stage == stage) for stage in range(num_stages)]
        self._movers = [place for place in places if place.may_go]
        self._donors = [place for place in self._movers if num_holders[place.stage] > 1]
        self._beside: dict[frozenset[str], Counter[int]] = {}

    @property
    def weakest(self) -> int:
        """How many servers the stage has that has the fewest."""
        return min(self._crowds.counts)

    def after(self, move: StageMove) -> _Placement:
        """Return the placement once a move is carried out; nobody goes twice."""
        places = [
            replace(each, stage=move.stage, holds=False, may_go=False) if each.server.peer == move.peer else each
            for each in self._places
        ]
        return _Placement(places, len(self._crowds.counts))

    def best(self, than: Crowd) -> StageMove | None:
        """Return the move that makes it better by most; None: by more than `than` none does."""
        best, found, counts = than, None, self._crowds.counts
        for place in self._donors:
            for stage, count in enumerate(counts):
                others = count - (counts[place.stage] - 1)
                if stage == place.stage or others > best.others:
                    continue
                change = Crowd(others, self._others_beside(place, stage) - self._others_beside(place, place.stage))
                if change < best:
                    best, found = change, self._move(place, stage)
        return found

    def first_of_two(self) -> StageMove | None:
        """Return who goes where first if two change places, so that fewer share a machine; of all pairs the best."""
        best, found = 0, None
        for donor in self._donors:
            if not self._others_beside(donor, donor.stage):
                continue  # of two whose change brings something, one shares a machine within its stage
            for other in self._movers:
                if other.stage != donor.stage and (change := self._swapped(donor, other)) < best:
                    best, found = change, self._move(donor, other.stage)
        return found

    def _move(self, place: _Place, stage: int) -> StageMove:
        return StageMove(place.server.peer, place.stage, stage, self._crowds.counts[stage] == 0)

    def _swapped(self, one: _Place, other: _Place) -> int:
        """Return how many more pairs share a machine when the two have changed places."""
        here = self._others_beside(one, other.stage) - self._others_beside(one, one.stage)
        there = self._others_beside(other, one.stage) - self._others_beside(other, other.stage)
        counted_twice = 2 * bool(one.hosts & other.hosts)
        return here + there - counted_twice

    def _others_beside(self, place: _Place, stage: int) -> int:
        """Return how many other servers of its machine a stage has."""
        beside = self._beside.get(place.hosts)
        if beside is None:
            beside = self._beside[place.hosts] = self._crowds.beside(place.hosts)
        return beside[stage] - (stage == place.stage and bool(place.hosts))
