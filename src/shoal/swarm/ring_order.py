"""In which order the members of a quorum stand, so that what travels around the ring takes the best links.

A ring is as fast as its slowest link: first that is made as fast as it can be, then the sum over all links as small.
The cost of a link is the time for `PART_BYTES` over it, with what either end has measured, the slower of both; a link
that nobody has measured costs as much as the median one. Links within a host cost nothing.

Members of one host stand next to each other, whatever their links say: what they exchange never leaves the host, and
of two hosts with many members only two links are used. The order is a function of its arguments: ties go to the order
in which members are given.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from shoal.ids import PeerId
from shoal.wire.messages.round import LinkReport

PART_BYTES = 1 << 20
"""What the cost of a link is the time for: a segment."""

EXACT_GROUPS = 8
"""With up to so many hosts all orders are compared: 5,040 of them."""

Links = Mapping[PeerId, Sequence[LinkReport]]
"""What each member has measured."""

NEAR = 8
"""So many of the best links of a member are tried in a large ring."""

MOST_TRIED = 10_000
"""So many changes of a large ring are tried: some hundredths of a second, in which nothing else is done."""

_GAIN = 1e-9
"""Less is no gain: sums are rounded, and a change back would be one as well."""

_Cost = tuple[float, float]
_Host = Sequence[PeerId]


def ring_order(members: Sequence[PeerId], links: Links) -> tuple[PeerId, ...]:
    """Return the members in the order in which they form a ring.

    Args:
        members: in the order that holds without measurements.
        links: what each member has measured; reports about other peers are ignored.
    """
    measured = _costs(members, links)
    if not measured:
        return tuple(members)
    hosts = _hosts(members, links)
    costs = _Costs(measured)
    order = _exact(hosts, costs) if len(hosts) <= EXACT_GROUPS else _LargeRing(_greedy(hosts, costs), costs).improved()
    return tuple(peer for host in order for peer in host)


class _Costs:
    """What it costs that two members are neighbours.

    Attributes:
        near: of each member those whose links with it somebody has measured, the best first.
    """

    def __init__(self, measured: Mapping[frozenset[PeerId], float]) -> None:
        self._measured = measured
        self.typical = statistics.median(measured.values())
        near: dict[PeerId, list[tuple[float, PeerId]]] = {}
        for link, cost in measured.items():
            one, other = link
            near.setdefault(one, []).append((cost, other))
            near.setdefault(other, []).append((cost, one))
        self.near = {peer: [other for _, other in sorted(found)] for peer, found in near.items()}

    def between(self, one: PeerId, other: PeerId) -> float:
        return self._measured.get(frozenset((one, other)), self.typical)


def _costs(members: Sequence[PeerId], links: Links) -> dict[frozenset[PeerId], float]:
    """Seconds for a part over each link that somebody has measured."""
    known = set(members)
    costs: dict[frozenset[PeerId], float] = {}
    for member in members:
        for report in links.get(member, ()):
            if report.peer not in known or report.peer == member or report.is_local:
                continue
            cost_s = report.round_trip_ms / 2e3 + PART_BYTES * 8e-6 / max(report.bandwidth_mbit, 1e-3)
            if math.isfinite(cost_s):
                link = frozenset((member, report.peer))
                costs[link] = max(cost_s, costs.get(link, 0.0))
    return costs


def _hosts(members: Sequence[PeerId], links: Links) -> list[_Host]:
    """The members by host, in the order of their first ones. Two are on one host if both say so."""
    local = {member: {report.peer for report in links.get(member, ()) if report.is_local} for member in members}
    hosts: dict[PeerId, list[PeerId]] = {}
    for member in members:
        homes = {first for first in local[member] if first in hosts and member in local[first]}
        # Of several the first one: whoever says so of more than one host has not told the truth to all of them.
        home = next((first for first in hosts if first in homes), member) if homes else member
        hosts.setdefault(home, []).append(member)
    return list(hosts.values())


def _links(order: Sequence[_Host], costs: _Costs) -> list[float]:
    """What the link from each host of the ring to the next one costs."""
    return [costs.between(one[-1], other[0]) for one, other in zip(order, [*order[1:], order[0]], strict=True)]


def _cost(order: Sequence[_Host], costs: _Costs) -> _Cost:
    """The slowest link of the ring, and the sum."""
    if len(order) < 2:
        return (0.0, 0.0)
    links = _links(order, costs)
    return (max(links), math.fsum(links))


def _exact(hosts: Sequence[_Host], costs: _Costs) -> Sequence[_Host]:
    """The best of all orders; a ring may start anywhere, so the first one stays."""
    orders = ((hosts[0], *rest) for rest in itertools.permutations(hosts[1:]))
    return min(orders, key=lambda order: _cost(order, costs))


def _greedy(hosts: Sequence[_Host], costs: _Costs) -> list[_Host]:
    """From host to host, always over the best link that is left; who has measured nothing comes in the order given."""
    host_of = {peer: host for host in hosts for peer in (host[0], host[-1])}
    order, left = [hosts[0]], {host[0]: host for host in hosts[1:]}
    while left:
        at = order[-1][-1]
        near = costs.near.get(at, [])
        known = next((peer for peer in near if peer in host_of and host_of[peer][0] in left), None)
        if known is None or costs.between(at, known) > costs.typical:
            known = next((first for first in left if first not in near), known)
        assert known is not None  # who is left is near, or is not
        host = left.pop(host_of[known][0])
        order.append(host if host[0] == known else host[::-1])
    return order


class _LargeRing:
    """Turns parts of a ring around as long as that makes it better (2-opt): first the dearest link, then the sum.

    Link i leads from host i to the next one. To turn what is between two links replaces these two and no other, since
    the hosts of that part are turned as well; so a change is judged without looking at the rest of the ring.
    """

    def __init__(self, order: list[_Host], costs: _Costs) -> None:
        self._order, self._costs = order, costs
        self._links = _links(order, costs)
        self._sorted = sorted(self._links)
        self._place = {peer: place for place, host in enumerate(order) for peer in (host[0], host[-1])}
        self._left = MOST_TRIED

    def improved(self) -> list[_Host]:
        """Return the best order that was found."""
        is_better = True
        while is_better and self._left > 0:
            improved = [self._improve(link) for link in range(len(self._order))]
            is_better = any(improved)
        return self._order

    def _improve(self, link: int) -> bool:
        """Replace a link, and another one with it, if that makes the ring better."""
        for other in self._partners(link):
            self._left -= 1
            if self._left <= 0:
                return False
            if other != link and self._turn(min(link, other), max(link, other)):
                return True
        return False

    def _partners(self, link: int) -> Iterator[int]:
        """Yield links that may be replaced together with this one: those that give one of its ends a better neighbour,
        and for the one that is dearer than all others every link."""
        number, cost = len(self._order), self._links[link]
        one, other = self._order[link][-1], self._order[(link + 1) % number][0]
        for end, is_last in ((one, True), (other, False)):
            for peer in self._costs.near.get(end, [])[:NEAR]:
                place = self._place.get(peer)
                if self._costs.between(end, peer) >= cost:
                    break
                if place is not None and peer == self._order[place][-1 if is_last else 0]:
                    yield place if is_last else (place - 1) % number
        if self._sorted[-2] < cost:
            yield from range(number)

    def _turn(self, first: int, second: int) -> bool:
        """Turn the hosts behind the first link, up to the second one, if that makes the ring better."""
        order, links, number = self._order, self._links, len(self._order)
        old = links[first], links[second]
        new = (
            self._costs.between(order[first][-1], order[second][-1]),
            self._costs.between(order[first + 1][0], order[(second + 1) % number][0]),
        )
        rest = list(self._sorted[-3:])
        for cost in old:
            if cost in rest:
                rest.remove(cost)
        dearest = max(*new, *rest)
        if dearest > self._sorted[-1] or (dearest == self._sorted[-1] and sum(new) >= sum(old) * (1 - _GAIN)):
            return False
        order[first + 1 : second + 1] = [host[::-1] for host in reversed(order[first + 1 : second + 1])]
        links[first + 1 : second] = reversed(links[first + 1 : second])
        links[first], links[second] = new
        for cost in old:
            self._sorted.pop(bisect.bisect_left(self._sorted, cost))
        for cost in new:
            bisect.insort(self._sorted, cost)
        for place in range(first + 1, second + 1):
            self._place[order[place][0]] = self._place[order[place][-1]] = place
        return True
