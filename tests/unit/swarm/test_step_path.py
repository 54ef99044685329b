"""Choosing a path: home where it can be, the best others where it must be."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.ids import PeerId
from shoal.swarm import step_path as module
from shoal.swarm.step_path import Avoidance, choose_path

CANDIDATES = [[PeerId(f"{stage}{i}") for i in range(3)] for stage in "AB"]


def path(avoidance: Avoidance, now_s: float = 0.0) -> tuple[str, ...] | None:
    return choose_path(CANDIDATES, avoidance, now_s)


def test_the_first_of_each_stage_is_taken() -> None:
    assert path(Avoidance()) == ("A0", "B0")


def test_a_peer_is_avoided_until_its_time_is_over() -> None:
    avoidance = Avoidance()
    avoidance.avoid(PeerId("A0"), 1.0)
    avoidance.lose(PeerId("B0"), 2.0)
    assert path(avoidance) == ("A1", "B1")
    assert avoidance.next_end_s(0.0) == 1.0
    assert path(avoidance, 1.0) == ("A0", "B1")
    avoidance.found(PeerId("B0"))
    assert path(avoidance, 2.0) == ("A0", "B0")
    assert avoidance.next_end_s(2.0) == float("inf")


def test_a_lost_peer_may_be_tried_again_but_is_the_last_choice_until_it_is_found() -> None:
    avoidance = Avoidance()
    avoidance.lose(PeerId("A0"), 9.0)
    assert choose_path([[PeerId("A0")]], avoidance, 0.0) is None
    avoidance.forget_losses()
    assert path(avoidance) == ("A1", "B0")
    assert choose_path([[PeerId("A0")]], avoidance, 0.0) == ("A0",)
    avoidance.found(PeerId("A0"))
    assert path(avoidance) == ("A0", "B0")


def test_a_broken_pair_is_avoided_in_both_directions_and_each_of_it_is_not() -> None:
    avoidance = Avoidance()
    avoidance.avoid_pair(PeerId("B0"), PeerId("A0"), 1.0)
    chosen = path(avoidance)
    assert chosen in (("A1", "B0"), ("A0", "B1"))
    avoidance.avoid_pair(PeerId("A1"), PeerId("B0"), 1.0)
    assert path(avoidance) == ("A0", "B1")


def test_a_suspect_is_used_where_there_is_no_other() -> None:
    avoidance = Avoidance()
    avoidance.suspect(PeerId("A0"), 1.0)
    assert path(avoidance) == ("A1", "B0")
    avoidance.avoid(PeerId("A1"), 1.0)
    avoidance.lose(PeerId("A2"), 1.0)
    assert path(avoidance) == ("A0", "B0")


def test_a_suspected_pair_is_used_where_there_is_no_other() -> None:
    avoidance = Avoidance()
    avoidance.suspect_pair(PeerId("B0"), PeerId("A0"), 1.0)
    assert path(avoidance) in (("A1", "B0"), ("A0", "B1"))
    assert path(avoidance, 1.0) == ("A0", "B0")
    only = [[PeerId("A0")], [PeerId("B0")]]
    assert choose_path(only, avoidance, 0.0) == ("A0", "B0")


def test_without_a_usable_peer_for_a_stage_there_is_no_path() -> None:
    avoidance = Avoidance()
    for peer in CANDIDATES[1]:
        avoidance.lose(peer, 1.0)
    assert path(avoidance) is None
    assert choose_path([CANDIDATES[0], []], Avoidance(), 0.0) is None


def test_in_a_closed_path_the_last_one_is_a_neighbour_of_the_first_one() -> None:
    three = [[PeerId(f"{stage}{i}") for i in range(2)] for stage in "ABC"]
    avoidance = Avoidance()
    avoidance.avoid_pair(PeerId("C0"), PeerId("A0"), 1.0)
    assert choose_path(three, avoidance, 0.0) == ("A0", "B0", "C0")
    chosen = choose_path(three, avoidance, 0.0, closes=True)
    assert chosen in (("A1", "B0", "C0"), ("A0", "B0", "C1"))
    assert choose_path(three, avoidance, 1.0, closes=True) == ("A0", "B0", "C0")


def test_where_no_path_closes_there_is_none_and_a_doubtful_end_is_the_last_choice() -> None:
    alone = [[PeerId("A0")], [PeerId("B0")], [PeerId("C0"), PeerId("C1")]]
    avoidance = Avoidance()
    avoidance.suspect_pair(PeerId("C0"), PeerId("A0"), 1.0)
    assert choose_path(alone, avoidance, 0.0, closes=True) == ("A0", "B0", "C1")
    for last in alone[2]:
        avoidance.avoid_pair(last, PeerId("A0"), 1.0)
    assert choose_path(alone, avoidance, 0.0, closes=True) is None
    assert choose_path([[PeerId("A0")], []], Avoidance(), 0.0, closes=True) is None


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("width", [1, 8])
def test_no_path_is_cheaper_than_the_one_that_is_chosen(
    closes: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FIRST_WIDTH", width)
    rng = random.Random(7)
    for _ in range(300):
        stages = [[PeerId(f"{stage}{place}") for place in range(rng.randint(1, 4))] for stage in range(3)]
        everybody = [peer for stage in stages for peer in stage]
        avoidance = Avoidance()
        for _ in range(rng.randint(0, 4)):
            one, other = rng.choice(everybody), rng.choice(everybody)
            rng.choice((avoidance.avoid, avoidance.lose, avoidance.suspect))(one, rng.choice((0.0, 9.0)))
            rng.choice((avoidance.avoid_pair, avoidance.suspect_pair))(one, other, rng.choice((0.0, 9.0)))
        costs = {path: _cost(path, stages, avoidance, closes) for path in itertools.product(*stages)}
        usable = {path: cost for path, cost in costs.items() if cost is not None}
        chosen = choose_path(stages, avoidance, 1.0, closes=closes)
        assert (chosen is None) == (not usable)
        if chosen is not None:
            assert usable[chosen] == min(usable.values())


@pytest.mark.parametrize("closes", [False, True])
def test_of_many_replicas_few_pairs_are_compared(closes: bool) -> None:
    stages = [[PeerId(f"{stage}{place}") for place in range(100)] for stage in range(8)]
    asked: list[tuple[PeerId, PeerId]] = []

    class Counted(Avoidance):
        def may_follow(self, one: PeerId, other: PeerId, now_s: float) -> bool:
            asked.append((one, other))
            return super().may_follow(one, other, now_s)

    avoidance = Counted()
    avoidance.lose(stages[3][0], 9.0)
    assert choose_path(stages, avoidance, 1.0, closes=closes) == tuple(
        peers[1] if number == 3 else peers[0] for number, peers in enumerate(stages)
    )
    assert len(asked) <= len(stages), "one of home is lost: the next one takes its place"
    asked.clear()
    avoidance.avoid_pair(stages[4][0], stages[5][0], 9.0)
    chosen = choose_path(stages, avoidance, 1.0, closes=closes)
    assert chosen is not None
    assert sum(int(peer[1:]) for peer in chosen) == 2
    assert len(asked) < 10_000, "of 70,000 pairs, each for a hundred first ones where the path closes"


def _cost(path: tuple[PeerId, ...], stages: list[list[PeerId]], avoidance: Avoidance, closes: bool) -> float | None:
    pairs = [*itertools.pairwise(path), *([(path[-1], path[0])] if closes else [])]
    if not all(avoidance.is_usable(peer, 1.0) for peer in path):
        return None
    if not all(avoidance.may_follow(*pair, 1.0) for pair in pairs):
        return None
    own = sum(avoidance.cost(peer, stage.index(peer), 1.0) for peer, stage in zip(path, stages, strict=True))
    return own + sum(avoidance.pair_cost(*pair, 1.0) for pair in pairs)
