"""Which nodes hold a key's records, as far as one was told, and whom to ask next."""

from __future__ import annotations

import random

import pytest

from shoal.control.record_holders import REPLICAS, SOME, RecordHolders

KEYS = tuple(range(0, 1600, 100))
FAR = 1 << 20
"""The id of one who asks and holds nothing."""
DICE = random.Random(0)


def _nearest(key: int, ids: dict[int, str]) -> list[str]:
    return [ids[node_id] for node_id in sorted(ids, key=lambda node_id: node_id ^ key)]


def _lookup(holders: RecordHolders[int, str], swarm: dict[int, str], number: int) -> dict[str, list[int]]:
    """Ask as `QuickLookup.read` does; each node names those twenty that are nearest to a key."""
    asked: dict[str, list[int]] = {}
    while chosen := holders.to_ask(KEYS, number, asked, own_counts=True):
        for node, keys in chosen.items():
            assert not set(keys) & set(asked.get(node, ())), "nobody is asked twice"
            for key in keys:
                named = _nearest(key, swarm)[:20]
                holders.learn(key, {node: node_id for node_id, node in swarm.items() if node in named})
            asked.setdefault(node, []).extend(keys)
    return asked


@pytest.mark.parametrize("own_id", [FAR, 0, 777])
@pytest.mark.parametrize("number", [SOME, REPLICAS])
@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_known_first_the_nearest_are_found_and_enough_of_them_are_asked(
    seed: int, number: int, own_id: int
) -> None:
    dice = random.Random(seed)
    swarm = {dice.getrandbits(12): f"node {dice.random()}" for _ in range(dice.randint(1, 60))}
    swarm.pop(own_id, None)
    holders: RecordHolders[int, str] = RecordHolders(own_id, DICE)
    first = dice.choice(list(swarm))
    for key in KEYS:
        holders.learn(key, {swarm[first]: first})
    asked = _lookup(holders, swarm, number)
    for key in KEYS:
        nearest = _nearest(key, swarm | {own_id: "own"})[:REPLICAS]
        assert list(holders.of(key)) == [node for node in nearest if node != "own"]
        knowing = [node for node in nearest if node == "own" or key in asked.get(node, ())]
        assert len(knowing) >= min(number, len(nearest))
        assert len(set(knowing) - {"own"}) >= 1, "one's own copy alone is not enough"


def test_few_nodes_are_asked_for_all_keys() -> None:
    swarm = {number: f"node {number}" for number in range(REPLICAS)}
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    for key in KEYS:
        holders.learn(key, {node: node_id for node_id, node in swarm.items()})
    asked = _lookup(holders, swarm, SOME)
    assert len(asked) == SOME
    assert all(sorted(keys) == list(KEYS) for keys in asked.values())


@pytest.mark.parametrize("own_counts", [False, True])
def test_what_a_holder_asks_itself_is_one_answer_if_it_counts(own_counts: bool) -> None:
    holders: RecordHolders[int, str] = RecordHolders(0, DICE)
    holders.learn(0, {f"node {number}": number for number in range(1, REPLICAS)})
    assert len(holders.to_ask([0], SOME, {}, own_counts=own_counts)) == SOME - own_counts


def test_not_always_the_same_are_asked() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    holders.learn(0, {f"node {number}": number for number in range(REPLICAS)})
    chosen = [frozenset(holders.to_ask([0], SOME, {}, own_counts=True)) for _ in range(200)]
    assert {len(nodes) for nodes in chosen} == {SOME}
    pairs = REPLICAS * (REPLICAS - 1) // 2
    assert len(set(chosen)) == pairs
    assert max(map(chosen.count, chosen)) < 3 * len(chosen) / pairs


def test_a_newcomer_that_is_nearer_takes_the_place_of_the_farthest() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    holders.learn(0, {f"node {number}": 10 + number for number in range(REPLICAS)})
    holders.learn(0, {"newcomer": 1})
    assert holders.of(0) == ("newcomer", *(f"node {number}" for number in range(REPLICAS - 1)))


def test_a_node_that_came_back_under_another_id_stands_where_this_one_puts_it() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    holders.learn(0, {"a": 1, "b": 2})
    holders.learn(0, {"a": 3})
    assert holders.of(0) == ("b", "a")


def test_who_does_not_answer_is_left_out_for_all_keys() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    for key in KEYS:
        holders.learn(key, {"a": 1, "b": 2})
    holders.forget("a")
    assert {holders.of(key) for key in KEYS} == {("b",)}
    assert set(holders.to_ask(KEYS, SOME, {}, own_counts=True)) == {"b"}
    holders.forget("a")


def test_nobody_is_asked_where_nobody_is_known() -> None:
    assert RecordHolders[int, str](FAR, DICE).to_ask(KEYS, SOME, {}, own_counts=True) == {}


def test_names_without_end_take_no_more_place_than_the_nearest() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    for number in range(10_000):
        holders.learn(0, {f"node {number}": number})
    assert holders.of(0) == tuple(f"node {number}" for number in range(REPLICAS))
    assert len(holders._nearest[0]) == REPLICAS


def test_what_was_said_before_is_forgotten_where_it_begins_anew() -> None:
    holders: RecordHolders[int, str] = RecordHolders(FAR, DICE)
    holders.learn(0, {f"far away {number}": number for number in range(REPLICAS)})
    holders.begin_anew()
    assert holders.of(0) == ()
    holders.learn(0, {"near": 100})
    assert holders.of(0) == ("near",)


def test_who_asks_is_a_holder_as_long_as_it_is_nearer_than_one_of_them() -> None:
    holders: RecordHolders[int, str] = RecordHolders(1000, DICE)
    assert holders.include_own(0)
    near = {f"node {number}": 10 + number for number in range(REPLICAS - 1)}
    holders.learn(0, near)
    assert holders.include_own(0)
    assert holders.of(0) == tuple(near)
    holders.learn(0, {"last": 1001})
    assert holders.include_own(0)
    assert holders.of(0) == tuple(near), "it takes the place of the last one"
    holders.learn(0, {"nearer": 999})
    assert not holders.include_own(0)
    assert holders.of(0) == (*near, "nearer")
