"""In which order the members of a quorum stand, so that what travels around the ring takes the best links.

A ring is as fast as its slowest link: first that is made as fast as it can be, then the sum over all links as small.
The cost of a link is the time for `PART_BYTES` over it, with what either end has measured, the slower of both; a link
that nobody has measured costs as much as the median one. Links within a host cost nothing.

Members of one host stand next to each other, whatever their links say: what they exchange never leaves the host, and
of two hosts with many members only two links are used. The order is a function of its arguments: ties go to the order
in which members are given.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from shoal.ids import PeerId
from shoal.wire.messages.round import LinkReport

PART_BYTES = 1 << 20
"""What the cost of a link is the time for: a segment."""

EXACT_GROUPS = 8
"""With up to so many hosts all orders are compared: 5,040 of them."""

Links = Mapping[PeerId, Sequence[LinkReport]]
"""What each member has measured."""

_Cost = tuple[float, float]
_Host = Sequence[PeerId]
_Between = Callable[[_Host, _Host], float]


def ring_order(members: Sequence[PeerId], links: Links) -> tuple[PeerId, ...]:
    """Return the members in the order in which they form a ring.

    Args:
        members: in the order that holds without measurements.
        links: what each member has measured; reports about other peers are ignored.
    """
    costs = _costs(members, links)
    if not costs:
        return tuple(members)
    hosts = _hosts(members, links)
    typical = statistics.median(costs.values())

    def between(one: _Host, other: _Host) -> float:
        return costs.get(frozenset((one[-1], other[0])), typical)

    order = _exact(hosts, between) if len(hosts) <= EXACT_GROUPS else _improved(_greedy(hosts, between), between)
    return tuple(peer for host in order for peer in host)


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


def _hosts(members: Sequence[PeerId], links: Links) -> list[list[PeerId]]:
    """The members by host, in the order of their first ones. Two are on one host if both say so."""
    local = {(member, report.peer) for member in members for report in links.get(member, ()) if report.is_local}
    hosts: list[list[PeerId]] = []
    for member in members:
        home = next((host for host in hosts if (host[0], member) in local and (member, host[0]) in local), None)
        if home is None:
            hosts.append([member])
        else:
            home.append(member)
    return hosts


def _cost(order: Sequence[_Host], between: _Between) -> _Cost:
    """The slowest link of the ring, and the sum."""
    if len(order) < 2:
        return (0.0, 0.0)
    costs = [between(one, other) for one, other in zip(order, [*order[1:], order[0]], strict=True)]
    return (max(costs), math.fsum(costs))


def _exact(hosts: Sequence[_Host], between: _Between) -> Sequence[_Host]:
    """The best of all orders; a ring may start anywhere, so the first one stays."""
    orders = ((hosts[0], *rest) for rest in itertools.permutations(hosts[1:]))
    return min(orders, key=lambda order: _cost(order, between))


def _greedy(hosts: Sequence[_Host], between: _Between) -> list[_Host]:
    """From host to host, always over the best link that is left."""
    order, left = [hosts[0]], list(hosts[1:])
    while left:
        following = min(left, key=lambda host: between(order[-1], host))
        left.remove(following)
        order.append(following)
    return order


def _improved(order: list[_Host], between: _Between) -> list[_Host]:
    """Turn parts of the order around as long as that makes it better (2-opt)."""
    best = _cost(order, between)
    is_better = True
    while is_better:
        is_better = False
        for start, stop in itertools.combinations(range(1, len(order) + 1), 2):
            turned = [*order[:start], *reversed(order[start:stop]), *order[stop:]]
            cost = _cost(turned, between)
            if cost < best:
                order, best, is_better = turned, cost, True
    return order
