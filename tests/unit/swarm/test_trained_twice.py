"""Two steps of a round that share samples: who is left out, so that no record counts a sample that is trained twice."""

from __future__ import annotations

import pytest

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm import round_quorums as module
from shoal.swarm.round_effects import TrainedTwice
from shoal.swarm.round_quorums import RoundQuorums, trained_twice
from shoal.swarm.round_settings import RoundSettings
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Join
from shoal.wire.messages.step import StepEntry

# Two replicas of each of two stages: A and B train over each other, and so do C and D.
A, B, C, D = (PeerId(letter) for letter in "abcd")
STAGE = {A: 0, B: 1, C: 0, D: 1}
OLD, NEW, OTHER = StepKey(1, 1, 5, 0), StepKey(1, 2, 5, 0), StepKey(0, 1, 5, 0)


def step(key: StepKey, *samples: tuple[int, int], pass_number: int = 0) -> StepEntry:
    ranges = tuple(SampleRange(pass_number, *item) for item in samples)
    return StepEntry(key, (), 0, ranges, sum(map(len, ranges)), sum(map(len, ranges)), 1.0, 0.1, False)


def joins(**steps: list[StepEntry]) -> dict[PeerId, Join]:
    return {
        peer: Join(Ballot(1, A, 1), 1, STAGE[peer], sum(s.num_samples for s in steps[peer]), (), tuple(steps[peer]), ())
        for peer in map(PeerId, steps)
    }


def test_steps_without_a_common_sample_are_nothing_to_speak_of() -> None:
    one = [step(OLD, (0, 4), (8, 9)), step(OTHER, (0, 4), pass_number=1)]
    two = [step(NEW, (4, 8)), step(StepKey(0, 1, 6, 0), (9, 20))]
    assert trained_twice(joins(a=one, b=one, c=two, d=two)) == []


@pytest.mark.parametrize("shared", [(3, 5), (0, 1), (0, 20), (2, 3)])
def test_the_side_with_fewer_samples_is_left_out(shared: tuple[int, int]) -> None:
    small, large = [step(OLD, (0, 4))], [step(NEW, shared), step(OTHER, (30, 60))]
    assert trained_twice(joins(a=small, b=small, c=large, d=large)) == [TrainedTwice(OLD, NEW, (A, B))]
    assert trained_twice(joins(a=large, b=large, c=small, d=small)) == [TrainedTwice(OLD, NEW, (C, D))]


def test_the_larger_side_is_left_out_where_a_stage_would_have_nobody_without_the_smaller_one() -> None:
    small, large = [step(OLD, (0, 4))], [step(NEW, (0, 4)), step(OTHER, (30, 60))]
    found = trained_twice(joins(a=small, b=small + large, c=large))
    assert found == [TrainedTwice(OLD, NEW, ())], "B has both, and is alone in its stage"
    found = trained_twice(joins(a=small, b=small, c=large))
    assert found == [TrainedTwice(OLD, NEW, (C,))]


def test_steps_that_one_replica_has_made_up_are_not_all_compared_with_each_other() -> None:
    made_up = [step(StepKey(3, 1, number, 0), (0, 4)) for number in range(100)]
    honest = [step(NEW, (0, 4)), step(OTHER, (4, 8))]
    assert [each.out for each in trained_twice(joins(a=made_up, c=honest, d=honest))] == [(A,)]
    assert len(trained_twice(joins(a=made_up, d=honest))) < 1200, "nobody else serves its stage"


def test_nothing_is_trained_twice_however_few_pairs_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = [step(OLD, (0, 2))], [step(NEW, (0, 4))], [step(OTHER, (3, 4), (20, 30))]
    given = joins(a=first, b=first, c=second + third, d=second)
    monkeypatch.setattr(module, "_MOST_PAIRS", 0)
    out = {peer for each in trained_twice(given) for peer in each.out}
    assert out
    rest = trained_twice({peer: join for peer, join in given.items() if peer not in out})
    assert not any(each.out for each in rest), "but by the last ones of a stage"


def test_a_step_that_is_out_already_shares_samples_with_nobody_any_more() -> None:
    first, second, third = [step(OLD, (0, 2))], [step(NEW, (0, 4))], [step(OTHER, (1, 2))]
    found = trained_twice(joins(a=first + third, b=first + third, c=second, d=second))
    assert [each.out for each in found] == [(A, B)]


def test_the_quorums_of_the_round_are_without_those_that_are_left_out() -> None:
    small, large = [step(OLD, (0, 4))], [step(NEW, (0, 4)), step(OTHER, (30, 60))]
    quorums = RoundQuorums()
    twice = quorums.begin(RoundSettings("run", 2, "D0"), joins(a=small, b=small, c=large, d=large), {})
    assert twice == [TrainedTwice(OLD, NEW, (A, B))]
    assert quorums.members == {C, D}
