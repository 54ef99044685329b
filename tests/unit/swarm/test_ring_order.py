"""The order of a ring: the slowest link first, then the sum; hosts in one piece."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from shoal.ids import Ballot, PeerId
from shoal.swarm import ring_order as module
from shoal.swarm.ring_order import EXACT_GROUPS, Links, ring_order
from shoal.swarm.round_quorums import first_quorum
from shoal.wire.messages.round import MAX_LINK_REPORTS, Join, LinkReport


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"P{index:02}") for index in range(count)]


def line(members: list[PeerId], places: list[float]) -> dict[PeerId, list[LinkReport]]:
    """Links whose round trip is the distance of the places, in ms."""
    at = dict(zip(members, places, strict=True))
    return {a: [LinkReport(b, abs(at[a] - at[b]), 1000.0) for b in members if b != a] for a in members}


def slowest_and_sum(order: tuple[PeerId, ...], links: Links) -> tuple[float, float]:
    trip = {(a, report.peer): report.round_trip_ms for a, reports in links.items() for report in reports}
    trips = [trip[a, b] for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    return max(trips), sum(trips)


def test_without_measurements_the_order_stays() -> None:
    members = [PeerId("c"), PeerId("a"), PeerId("b")]
    assert ring_order(members, {}) == tuple(members)
    assert ring_order(members, {members[0]: [LinkReport(PeerId("stranger"), 1.0, 1.0)]}) == tuple(members)
    assert ring_order(members, {members[0]: [LinkReport(members[1], 0.0, 0.0, True)]}) == tuple(members)


@pytest.mark.parametrize("seed", range(5))
def test_no_order_of_a_small_ring_is_better(seed: int) -> None:
    rng = random.Random(seed)
    members = peers(6)
    links = line(members, [rng.uniform(0, 100) for _ in members])
    found = slowest_and_sum(ring_order(members, links), links)
    best = min(slowest_and_sum((members[0], *rest), links) for rest in itertools.permutations(members[1:]))
    assert found == pytest.approx(best)


def test_the_slowest_link_counts_before_the_sum() -> None:
    a, b, c, d = members = peers(4)
    fast = {frozenset(pair): 10.0 for pair in itertools.combinations(members, 2)}
    fast |= {frozenset((a, b)): 1.0, frozenset((c, d)): 1.0, frozenset((b, c)): 1.0, frozenset((a, d)): 30.0}
    links = {x: [LinkReport(y, fast[frozenset((x, y))], 1000.0) for y in members if y != x] for x in members}
    order = ring_order(members, links)
    assert slowest_and_sum(order, links)[0] == 10.0


def test_bandwidth_counts_as_well() -> None:
    members = peers(4)
    slow = frozenset(members[:2])
    links = {x: [LinkReport(y, 10.0, 1.0 if {x, y} == slow else 1000.0) for y in members if y != x] for x in members}
    order = ring_order(members, links)
    assert slow not in {frozenset(pair) for pair in zip(order, [*order[1:], order[0]], strict=True)}


def test_the_slower_report_of_two_counts_and_an_unknown_link_is_an_ordinary_one() -> None:
    a, b, c, d = members = peers(4)
    links = {a: [LinkReport(b, 1.0, 1000.0), LinkReport(c, 2.0, 1000.0)], b: [LinkReport(a, 500.0, 1000.0)]}
    order = ring_order(members, links)
    assert frozenset((a, b)) not in {frozenset(pair) for pair in zip(order, [*order[1:], order[0]], strict=True)}
    assert set(order) == {a, b, c, d}


def test_members_of_one_host_stand_next_to_each_other() -> None:
    members = peers(9)
    host = {peer: index % 3 for index, peer in enumerate(members)}
    links = {
        x: [
            LinkReport(y, 0.0, 0.0, True) if host[x] == host[y] else LinkReport(y, 5.0, 100.0)
            for y in members
            if y != x
        ]
        for x in members
    }
    order = [host[peer] for peer in ring_order(members, links)]
    assert len([1 for a, b in itertools.pairwise(order) if a != b]) == 2


def test_one_that_says_alone_that_it_shares_a_host_is_not_believed() -> None:
    a, b, c = members = peers(3)
    links = {a: [LinkReport(c, 0.0, 0.0, True), LinkReport(b, 3.0, 10.0)]}
    assert set(ring_order(members, links)) == {a, b, c}


def test_a_large_ring_is_nearly_as_short_as_it_can_be_and_always_the_same() -> None:
    rng = random.Random(1)
    members = peers(EXACT_GROUPS + 12)
    links = line(members, [rng.uniform(0, 1000) for _ in members])
    order = ring_order(members, links)
    assert sorted(order) == sorted(members)
    assert order == ring_order(members, links)
    places = slowest_and_sum(order, links)
    # On a line the best ring goes there and back.
    width = max(report.round_trip_ms for reports in links.values() for report in reports)
    assert places[1] <= 2.2 * width
    assert places[0] < slowest_and_sum(tuple(members), links)[0]


def test_the_quorum_of_a_stage_stands_in_the_order_of_its_links() -> None:
    members = peers(4)
    links = line(members, [0.0, 50.0, 1.0, 51.0])
    joins = {peer: Join(Ballot(1, PeerId("C"), 1), 1, 0, 0, (), (), (), tuple(links[peer])) for peer in members}
    quorum = first_quorum(0, joins, {peer: slot for slot, peer in enumerate(members)}, 0)
    assert quorum.members == ring_order(members, links) != tuple(members)


@pytest.mark.parametrize("bad", [(-1.0, 1.0), (1.0, -1.0)])
def test_a_join_with_impossible_measurements_is_refused(bad: tuple[float, float]) -> None:
    join = Join(Ballot(1, PeerId("C"), 1), 1, 0, 0, (), (), (), (LinkReport(PeerId("P"), *bad),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join)


def test_a_join_with_too_many_measurements_is_refused() -> None:
    reports = (LinkReport(PeerId("P"), 1.0, 1.0),) * (MAX_LINK_REPORTS + 1)
    join = Join(Ballot(1, PeerId("C"), 1), 1, 0, 0, (), (), (), reports)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(join), type=Join)


def test_a_measurement_that_is_no_number_does_no_harm() -> None:
    members = peers(3)
    links = {members[0]: [LinkReport(members[1], float("nan"), 1.0), LinkReport(members[2], 1.0, float("inf"))]}
    assert set(ring_order(members, links)) == set(members)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_ring_of_hosts_keeps_them_whole_and_is_better_than_the_order_that_it_begins_with(seed: int) -> None:
    rng = random.Random(seed)
    members = peers(48)
    rng.shuffle(members)
    host, at = {peer: int(peer[1:]) // 3 for peer in members}, [rng.uniform(0, 1000) for _ in range(16)]
    links = {
        x: [
            LinkReport(y, 0.0, 0.0, True)
            if host[x] == host[y]
            else LinkReport(y, abs(at[host[x]] - at[host[y]]) + 1.0, 1000.0)
            for y in members
            if y != x
        ]
        for x in members
    }
    order = ring_order(members, links)
    assert sorted(order) == sorted(members)
    homes = [host[peer] for peer in order]
    assert len([1 for a, b in itertools.pairwise([*homes, homes[0]]) if a != b]) == 16
    assert slowest_and_sum(order, links) < slowest_and_sum(tuple(members), links)


def test_what_a_turn_leaves_is_what_a_ring_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    members = peers(40)
    links = {x: [LinkReport(y, rng.uniform(1, 100), 1000.0) for y in rng.sample(members, 12)] for x in members}
    costs = module._Costs(module._costs(members, links))
    before = module._greedy([(peer,) for peer in members], costs)
    ring = module._LargeRing(list(before), costs)
    order = ring.improved()
    dearest, total = module._cost(order, costs)
    assert (ring._sorted[-1], sum(ring._links)) == (dearest, pytest.approx(total))
    assert ring._sorted == sorted(ring._links)
    assert (dearest, total) < module._cost(before, costs)
    assert ring._place == {host[0]: place for place, host in enumerate(order)}
    monkeypatch.setattr(module, "MOST_TRIED", 1)
    assert module._LargeRing(list(before), costs).improved() == before, "who has no time left leaves it as it is"
