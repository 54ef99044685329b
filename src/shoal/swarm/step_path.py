"""Which replicas a trainer drives a step through: its home path where it can, the best others where it must.

Pure: times come as arguments. A peer, or a pair of neighbours, that failed is avoided for a while and not for ever; a
peer that was too slow, or a pair that was apart not long ago, is only used where there is no other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from shoal.ids import PeerId
from shoal.wire.messages.base import Hop, Replicas

# More than any place in an order of preference.
_SUSPECT_COST = 1e6

_Pair = tuple[PeerId, PeerId]
_Found = tuple[float, tuple[PeerId, ...]]
_Priced = tuple[float, PeerId]

_FIRST_WIDTH = 8
"""So many of each stage are looked at first; more where a path over others may be cheaper."""


class Avoidance:
    """Who is not to be used until when, in seconds of the driver's clock."""

    def __init__(self) -> None:
        self._avoided: dict[PeerId, float] = {}
        self._broken: dict[_Pair, float] = {}
        self._lost: dict[PeerId, float] = {}
        self._suspected: dict[PeerId | _Pair, float] = {}
        self._away: set[PeerId] = set()
        self._looked_for: set[PeerId] = set()

    def avoid(self, peer: PeerId, until_s: float) -> None:
        """The peer answers, but cannot take a step now."""
        self._avoided[peer] = until_s

    def lose(self, peer: PeerId, until_s: float) -> None:
        """The peer cannot be reached; until `found` it is only used where there is no other."""
        self._lost[peer] = until_s
        self._away.add(peer)
        self._looked_for.discard(peer)

    def found(self, peer: PeerId) -> None:
        """There is a connection with the peer."""
        self._lost.pop(peer, None)
        self._away.discard(peer)
        self._looked_for.discard(peer)

    def suspect(self, peer: PeerId, until_s: float) -> None:
        """The peer may be what made a step fail or take too long."""
        self._suspected[peer] = until_s

    def avoid_pair(self, one: PeerId, other: PeerId, until_s: float) -> None:
        """The two cannot reach each other."""
        self._broken[_pair(one, other)] = until_s

    def suspect_pair(self, one: PeerId, other: PeerId, until_s: float) -> None:
        """The two may not reach each other yet, and to find out takes long."""
        self._suspected[_pair(one, other)] = until_s

    def forget_losses(self) -> None:
        """Peers that could not be reached may be tried again, if need be."""
        self._lost.clear()

    def is_usable(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer may be tried."""
        return self._avoided.get(peer, now_s) <= now_s and not self.is_lost(peer, now_s)

    def is_lost(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer could not be reached a moment ago."""
        return self._lost.get(peer, now_s) > now_s

    def look_for(self, peers: Iterable[PeerId], now_s: float) -> list[PeerId]:
        """Return which of these peers are to be dialled to see whether they are back; `lose` or `found` follows."""
        away = [peer for peer in peers if peer in self._away - self._looked_for and not self.is_lost(peer, now_s)]
        self._looked_for.update(away)
        return away

    def may_follow(self, one: PeerId, other: PeerId, now_s: float) -> bool:
        """Whether the two may be neighbours on a path."""
        return self._broken.get(_pair(one, other), now_s) <= now_s

    def is_doubted(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer is only used where there is no other."""
        return peer in self._away or self._is_suspected(peer, now_s)

    def cost(self, peer: PeerId, place: int, now_s: float) -> float:
        """What it costs to use the peer at `place` of the order of preference."""
        return place + (_SUSPECT_COST if self.is_doubted(peer, now_s) else 0.0)

    def pair_cost(self, one: PeerId, other: PeerId, now_s: float) -> float:
        """What it costs that the two are neighbours."""
        return _SUSPECT_COST if self._is_suspected(_pair(one, other), now_s) else 0.0

    def next_end_s(self, now_s: float) -> float:
        """When the next peer or pair can be used again; infinite if none is kept out."""
        ends = [*self._avoided.values(), *self._broken.values(), *self._lost.values()]
        return min((end_s for end_s in ends if end_s > now_s), default=math.inf)

    def forget_ended(self, now_s: float) -> None:
        """Frees the memory of what has ended."""
        self._avoided = {peer: end_s for peer, end_s in self._avoided.items() if end_s > now_s}
        self._broken = {pair: end_s for pair, end_s in self._broken.items() if end_s > now_s}
        self._lost = {peer: end_s for peer, end_s in self._lost.items() if end_s > now_s}
        self._suspected = {who: end_s for who, end_s in self._suspected.items() if end_s > now_s}

    def _is_suspected(self, who: PeerId | _Pair, now_s: float) -> bool:
        return self._suspected.get(who, now_s) > now_s


def candidates(home: Sequence[Hop], replicas: Replicas, without: Collection[PeerId]) -> list[list[PeerId]]:
    """Of each stage: the home replica, then the others in their order; home comes last where it is no replica now.

    Args:
        without: left out where a stage has any other.
    """
    found: list[list[PeerId]] = []
    for stage, hop in enumerate(home):
        listed = [other.peer for other in replicas[stage]] if stage < len(replicas) else []
        preferred = [hop.peer] if hop.peer in listed else []
        peers = list(dict.fromkeys([*preferred, *listed, hop.peer]))
        found.append([peer for peer in peers if peer not in without] or peers)
    return found


def choose_path(
    candidates: Sequence[Sequence[PeerId]], avoidance: Avoidance, now_s: float, *, closes: bool = False
) -> tuple[PeerId, ...] | None:
    """Choose the cheapest usable path.

    Args:
        candidates: of each stage, best first: the home replica before all others.
        closes: whether the last one of the path and the first one are neighbours as well: the path is wrapped.

    Returns:
        One peer for each stage, or None if no complete path is usable now.
    """
    first = [_first_choice(peers, avoidance, now_s) for peers in candidates]
    if any(peer is None for peer in first):
        return None
    best = tuple(peer for peer in first if peer is not None)
    if _are_neighbours(best, avoidance, now_s, closes=closes):
        return best  # as mostly; to compare all pairs of many replicas takes many milliseconds
    usable = [_usable(peers, avoidance, now_s) for peers in candidates]
    width = _FIRST_WIDTH
    while True:
        found = _cheapest([stage[:width] for stage in usable], avoidance, now_s, closes=closes)
        # A path over somebody who was not looked at costs at least so much.
        least = sum(stage[0][0] for stage in usable)
        beyond = min(
            (least - stage[0][0] + stage[width][0] for stage in usable if len(stage) > width), default=math.inf
        )
        if beyond == math.inf or (found is not None and found[0] <= beyond):
            return None if found is None else found[1]
        width *= 4


def is_undoubted(path: Sequence[PeerId], avoidance: Avoidance, now_s: float, *, closes: bool) -> bool:
    """Whether nothing is known against the peers of a path, nor against any two neighbours; `closes`: see above."""
    is_sound = all(avoidance.is_usable(peer, now_s) and not avoidance.is_doubted(peer, now_s) for peer in path)
    return is_sound and _are_neighbours(path, avoidance, now_s, closes=closes)


def _first_choice(peers: Sequence[PeerId], avoidance: Avoidance, now_s: float) -> PeerId | None:
    """Return who costs least of a stage: the first one that nothing is known against, or else the first one at all."""
    usable = (peer for peer in peers if avoidance.is_usable(peer, now_s))
    first = next(usable, None)
    if first is None or not avoidance.is_doubted(first, now_s):
        return first
    return next((peer for peer in usable if not avoidance.is_doubted(peer, now_s)), first)


def _usable(peers: Sequence[PeerId], avoidance: Avoidance, now_s: float) -> list[_Priced]:
    """Return whoever of a stage may be tried, with what that costs, the cheapest first."""
    there = [(place, peer) for place, peer in enumerate(peers) if avoidance.is_usable(peer, now_s)]
    return sorted((avoidance.cost(peer, place, now_s), peer) for place, peer in there)


def _are_neighbours(path: Sequence[PeerId], avoidance: Avoidance, now_s: float, *, closes: bool) -> bool:
    """Whether nothing is known against any two neighbours."""
    pairs = [*pairwise(path), (path[-1], path[0])] if closes else pairwise(path)
    return all(
        avoidance.may_follow(one, other, now_s) and not avoidance.pair_cost(one, other, now_s) for one, other in pairs
    )


def _cheapest(
    stages: Sequence[Sequence[_Priced]], avoidance: Avoidance, now_s: float, *, closes: bool
) -> _Found | None:
    """Return the cheapest path over these peers, with what it costs."""
    starts = [(cost, (peer,)) for cost, peer in stages[0]]
    if not closes:
        return min(_paths(starts, stages[1:], avoidance, now_s), key=_cost, default=None)
    # Which last one is best depends on the first one, so that each first one has a best path of its own.
    closed = [
        (cost + avoidance.pair_cost(path[-1], path[0], now_s), path)
        for start in starts
        for cost, path in _paths([start], stages[1:], avoidance, now_s)
        if avoidance.may_follow(path[-1], path[0], now_s)
    ]
    return min(closed, key=_cost, default=None)


def _paths(
    starts: list[_Found], stages: Sequence[Sequence[_Priced]], avoidance: Avoidance, now_s: float
) -> list[_Found]:
    """Return the cheapest path to each peer of the last stage, from any of the starts."""
    best = starts
    for priced in stages:
        reached: list[_Found] = []
        for price, peer in priced:
            before = _before(best, peer, avoidance, now_s)
            if before:
                cost, path = min(before, key=_cost)
                reached.append((cost + price, (*path, peer)))
        best = reached
    return best


def _before(best: list[_Found], peer: PeerId, avoidance: Avoidance, now_s: float) -> list[_Found]:
    """Return the paths that may go on with the peer, each with what that pair costs."""
    return [
        (cost + avoidance.pair_cost(path[-1], peer, now_s), path)
        for cost, path in best
        if avoidance.may_follow(path[-1], peer, now_s)
    ]


def _cost(found: _Found) -> float:
    return found[0]


def _pair(one: PeerId, other: PeerId) -> _Pair:
    return (one, other) if one < other else (other, one)
