"""Where servers stand before the first round, corrected by who sees them all.

Servers that start together choose their stages each by what it sees of the others (`swarm.assignment`). On a slow
machine that may be a part of them: then too many take one stage, or one machine has all replicas of a stage and would
take it with it. Until something is trained a server goes elsewhere without a loss, so the coordinator has that done
first, one server at a time. Everybody computes the same from the same view.

What is better: first, stages that have more nearly the same number of replicas; then, fewer replicas of one stage on
one machine. Where no server alone can make it better, two that change places can, and the first of them is named: once
it has moved, no single move is better than that of the other one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.ids import PeerId
from shoal.swarm.assignment import assign
from shoal.swarm.reassignment import StageMove
from shoal.swarm.view import Candidate, SwarmView


class _Change(NamedTuple):
    """What a move changes: the sum of squares of the stages' counts, and the pairs of replicas of one stage that share
    a machine. Less is better."""

    squares: int
    sharing: int


@dataclass(frozen=True)
class _Mover:
    """A server that may be sent, and with how many others of each stage it shares its machine."""

    server: Candidate
    stage: int
    beside: Sequence[int]

    def to(self, stage: int, counts: Sequence[int]) -> _Change:
        squares = 2 * (counts[stage] - counts[self.stage] + 1)
        return _Change(squares, self.beside[stage] - self.beside[self.stage])

    def swapped_with(self, other: _Mover) -> int:
        """Return how many more pairs share a machine when the two have changed places."""
        counted_twice = 2 * bool(self.server.hosts & other.server.hosts)
        here = self.beside[other.stage] - self.beside[self.stage]
        return here + other.beside[self.stage] - other.beside[other.stage] - counted_twice


_NOTHING = _Change(0, 0)


def correction(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], exempt: Collection[PeerId] = ()
) -> StageMove | None:
    """Return the move that makes the placement better, or None if it is as good as it can be made.

    Moves that are carried out one after the other come to an end: each, or each two, make it strictly better. Then
    the counts of two stages differ by one at most, and no machine has two replicas of one stage more than of another
    one, unless servers that must stay are in the way. Whether a stage fits a server only that one knows: it refuses,
    and is `exempt` from then on.

    Args:
        view: the servers, at the stages that they serve; nothing is trained yet.
        holders: the replicas that can be reached; only these are sent.
    """
    chosen = assign(view, num_stages)
    places: list[tuple[Candidate, int]] = [(r, r.stage) for r in view.replicas if r.stage < num_stages]
    places += [(c, chosen[c.peer]) for c in view.candidates if c.peer in chosen]
    counts = [sum(stage == each for _, stage in places) for each in range(num_stages)]
    may_go = {r.peer for r in view.replicas if r.peer in holders and not r.pinned} - set(exempt)
    free = sorted((place for place in places if place[0].peer in may_go), key=lambda p: p[0].seniority, reverse=True)
    movers = [_Mover(server, stage, _beside(server, places, num_stages)) for server, stage in free]
    # A stage keeps a replica that is there: one that is only expected may not come.
    there = Counter[int](r.stage for r in view.replicas if r.peer in holders)
    donors = [mover for mover in movers if there[mover.stage] > 1]
    best, found = _NOTHING, None
    for mover in donors:
        for stage in range(num_stages):
            if stage != mover.stage and (change := mover.to(stage, counts)) < best:
                best, found = change, (mover, stage)
    if found is None:
        found = _first_of_two(donors, movers)
    if found is None:
        return None
    mover, stage = found
    return StageMove(mover.server.peer, mover.stage, stage, counts[stage] == 0)


def _first_of_two(donors: Sequence[_Mover], movers: Sequence[_Mover]) -> tuple[_Mover, int] | None:
    """Return who goes where first if two change places; of all pairs the best, by order of `donors`."""
    best, found = 0, None
    for mover in donors:
        if not mover.beside[mover.stage]:
            continue  # of two whose change brings something, one shares a machine within its stage
        for other in movers:
            if other.stage != mover.stage and (sharing := mover.swapped_with(other)) < best:
                best, found = sharing, (mover, other.stage)
    return found


def _beside(server: Candidate, places: Sequence[tuple[Candidate, int]], num_stages: int) -> tuple[int, ...]:
    hosts = server.hosts
    found = Counter(stage for other, stage in places if other.peer != server.peer and other.hosts & hosts)
    return tuple(found[stage] for stage in range(num_stages))
