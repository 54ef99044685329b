"""Which server moves once something is trained: the rule, on chosen and on random views."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shoal.ids import PeerId, StageIndex
from shoal.swarm.placement import MIN_GAIN, StageMove, improve
from shoal.swarm.view import Candidate, Replica, SwarmView
from shoal.wire.messages.base import Hop


def server(name: str, stage: int, *, age: float = 0.0, pinned: bool = False) -> Replica:
    return Replica(Hop(PeerId(name), ()), -age, stage=StageIndex(stage), pinned=pinned, serving=True, step=1)


def swarm(*counts: int) -> SwarmView:
    """So many equal servers at each stage; the later ones are younger."""
    servers = [
        server(f"s{stage}.{place}", stage, age=100.0 - place) for stage, n in enumerate(counts) for place in range(n)
    ]
    return SwarmView(tuple(servers))


def peers(view: SwarmView) -> set[PeerId]:
    return {replica.peer for replica in view.replicas}


def decide(view: SwarmView, num_stages: int, **options: object) -> StageMove | None:
    options.setdefault("holders", peers(view))
    return improve(view, num_stages, trains=True, **options)


def strengths(view: SwarmView, num_stages: int) -> list[int]:
    return list(view.num_replicas(num_stages))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((3, 1), ("s0.2", 0, 1, False)),
        ((1, 3), ("s1.2", 1, 0, False)),
        ((2, 4, 1), ("s1.3", 1, 2, False)),
        ((2, 0), ("s0.1", 0, 1, True)),
        ((3, 0, 0), ("s0.2", 0, 1, True)),
        ((5, 1, 1), ("s0.4", 0, 1, False)),  # one move alone raises nothing, two do
        ((2, 1), None),
        ((3, 2), None),
        ((3, 1, 1), None),
        ((1, 0), None),  # never the last
        ((2, 0, 0), None),  # it would serve nobody
        ((2, 2), None),
    ],
)
def test_the_youngest_of_the_strongest_stage_goes_to_the_weakest_if_that_helps_the_whole(
    counts: tuple[int, ...], expected: tuple[object, ...] | None
) -> None:
    assert decide(swarm(*counts), len(counts)) == expected


def test_a_small_gain_is_not_worth_a_move() -> None:
    assert decide(swarm(12, 10), 2) is None  # 11 against 10: no more than 10 %
    assert decide(swarm(11, 9), 2) == ("s0.10", 0, 1, False)


def test_who_was_given_its_stage_who_does_not_hold_the_record_and_who_is_exempt_stays() -> None:
    view = swarm(4, 1)
    assert decide(view, 2).peer == "s0.3"
    assert decide(view, 2, exempt={"s0.3"}).peer == "s0.2"
    assert decide(view, 2, holders=peers(view) - {"s0.3", "s0.2"}).peer == "s0.1"
    pinned = SwarmView(tuple(replace(replica, pinned=True) for replica in view.replicas))
    assert decide(pinned, 2) is None


def test_the_last_holder_of_a_stage_stays_although_others_are_loading_there() -> None:
    view = swarm(3, 0)
    assert decide(view, 2, holders={"s0.0"}) is None
    assert decide(view, 2, holders={"s0.0", "s0.1"}).peer == "s0.1"


def test_a_newcomer_or_a_candidate_fills_the_gap_without_a_move() -> None:
    view = swarm(3, 0)
    loading = replace(server("new", 1), base_round=-1, serving=False, step=0)
    assert decide(SwarmView((*view.replicas, loading)), 2, holders=peers(view)) is not None  # 3 against 1
    view = swarm(2, 0)
    assert decide(SwarmView((*view.replicas, loading)), 2, holders=peers(view)) is None
    candidate = Candidate(Hop(PeerId("new"), ()), 5.0)
    assert decide(SwarmView(view.replicas, (candidate,)), 2) is None


@pytest.mark.parametrize("block", range(10))
def test_moves_on_random_swarms_come_to_an_end_and_each_series_makes_the_swarm_faster(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        num_stages = rng.randint(1, 6)
        view = SwarmView(
            tuple(
                server(
                    f"p{i}",
                    rng.choice([0, rng.randrange(num_stages)]),
                    age=rng.choice([1.0, 2.0, rng.random()]),
                    pinned=rng.random() < 0.1,
                )
                for i in range(rng.randint(1, 16))
            )
        )
        slowest = min(strengths(view, num_stages))
        moves = 0
        while (move := decide(view, num_stages)) is not None:
            before = strengths(view, num_stages)
            shuffled = SwarmView(tuple(rng.sample(view.replicas, len(view.replicas))))
            assert decide(shuffled, num_stages) == move, "everybody computes the same"
            moved = view.replica(move.peer)
            assert moved is not None
            assert not moved.pinned
            assert len(view.by_stage(move.origin)) > 1
            view = view.placed({move.peer: move.stage})
            after = strengths(view, num_stages)
            assert sorted(after) > sorted(before), "no move undoes another"
            moves += 1
            assert moves <= 3 * len(view.replicas), f"seed {seed} does not settle"
        fastest = min(strengths(view, num_stages))
        assert fastest > slowest * (1 + MIN_GAIN) if moves else fastest == slowest
        if not any(replica.pinned for replica in view.replicas):
            ideal = len(view.replicas) // num_stages
            assert fastest == ideal or fastest * (1 + MIN_GAIN) >= ideal or ideal == 0, seed
