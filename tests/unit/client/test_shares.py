"""What each pipeline has trained, and how fast it is by that."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoal.client.shares import Shares, evaluation_shares
from shoal.events.run import StepReported
from shoal.ids import PeerId
from shoal.swarm.routing import Pipeline
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Evaluation


def pipeline(slot: int, *peers: str) -> Pipeline:
    return Pipeline(slot, tuple(Hop(PeerId(peer), ()) for peer in peers))


def step(slot: int, num_samples: int, duration_s: float, at_s: float = 0.0) -> StepReported:
    return StepReported(slot, 0, 0, num_samples, num_samples, 5.0, False, duration_s, at_s)


FIRST, SECOND, THIRD = pipeline(0, "a", "b"), pipeline(1, "c", "d"), pipeline(2, "e", "f")


def test_speeds_stay_with_the_replicas_whatever_slot_they_get() -> None:
    shares = Shares()
    shares.begin_round((FIRST, SECOND, THIRD))
    assert shares.speeds((FIRST, SECOND, THIRD)) == (0, 0, 0)
    shares.step(step(1, 8, 2.0))
    shares.step(step(2, 8, 1.0))
    moved = (pipeline(0, "c", "d"), pipeline(1, "e", "f"), pipeline(2, "c", "f"))
    assert shares.speeds(moved) == (4, 8, 0)
    shares.begin_round(moved)
    shares.step(step(0, 8, 2.0))
    assert shares.speeds(moved) == (4, 8, 0)


def test_a_round_is_summed_up_by_slot() -> None:
    shares = Shares()
    shares.begin_round((FIRST, SECOND))
    assert shares.of_round().waited_s == 0
    for report in (step(0, 8, 1.0, 1.0), step(0, 4, 1.0, 2.5), step(1, 3, 1.5, 2.0), step(7, 9, 1.0, 9.0)):
        shares.step(report)
    shared = shares.of_round()
    assert (shared.samples, shared.samples_per_s, shared.waited_s) == ({0: 12, 1: 3}, {0: 6, 1: 2}, 0.5)
    shares.begin_round((FIRST, SECOND))
    assert shares.of_round().samples == {}


@pytest.mark.parametrize(
    ("speeds", "cuts"),
    [
        ((), [0, 3, 6, 10]),
        ((0.0, 0.0, 0.0), [0, 3, 7, 10]),
        ((6.0, 3.0, 1.0), [0, 6, 9, 10]),
        ((1.0, 0.0, 1.0), [0, 3, 7, 10]),
    ],
)
def test_the_held_out_set_is_cut_by_speed(speeds: tuple[float, ...], cuts: list[int]) -> None:
    expected = [Evaluation(4, start, stop) for start, stop in pairwise(cuts)]
    assert evaluation_shares(4, 10, 3, speeds) == expected


def test_a_share_of_nothing_is_none() -> None:
    assert evaluation_shares(4, 1, 2, (1.0, 100.0)) == [None, Evaluation(4, 0, 1)]
    assert evaluation_shares(4, 0, 2, ()) == [None, None]
