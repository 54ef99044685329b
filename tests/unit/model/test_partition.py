"""Cutting a model into stages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.model.partition import StageUnits, counts_by_cost, cut, cut_by_counts, units_by_counts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_has_a_cheaper_most_expensive_stage(costs: list[int], num_stages: int) -> None:
    if num_stages > len(costs):
        num_stages = len(costs)
    ranges = cut([float(c) for c in costs], num_stages)
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    assert len(ranges) == num_stages
    assert all(len(r) > 0 for r in ranges)
    ours = max(sum(costs[i] for i in r) for r in ranges)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, len(costs)]))
        for ends in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    assert ours == best


def test_one_stage_holds_everything_and_as_many_stages_as_units_hold_one_each() -> None:
    assert cut([1.0, 5.0, 1.0], 1) == [range(3)]
    assert cut([1.0, 5.0, 1.0], 3) == [range(1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("num_stages", [0, -1, 4])
def test_more_stages_than_units_or_none_are_refused(num_stages: int) -> None:
    with pytest.raises(ConfigError, match="choose 1 to 3"):
        cut([1.0, 1.0, 1.0], num_stages)


def test_a_cut_by_hand_is_taken_as_it_is() -> None:
    assert cut_by_counts([1, 3, 2], num_units=6, num_stages=3) == [range(1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize("counts", [[1, 2], [0, 3, 3], [2, 2, 3], [6]])
def test_a_cut_by_hand_that_does_not_fit_is_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="add up to the model's 6 units"):
        cut_by_counts(counts, num_units=6, num_stages=3)


def test_the_first_stage_of_a_tied_model_has_both_ends_of_it() -> None:
    costs = [1, 4, 4, 4, 4, 9]
    assert counts_by_cost(costs, 3) == (3, 2, 1)
    assert counts_by_cost(costs, 3, is_tied=True) == (2, 2, 2)
    found = units_by_counts([3, 2, 1], 6, 3, is_tied=True)
    assert found == [
        StageUnits(range(2), range(5, 6)),
        StageUnits(range(2, 4)),
        StageUnits(range(4, 5)),
    ]
    assert [units.indices for units in found] == [(0, 1, 5), (2, 3), (4,)]


def test_a_tied_model_in_one_stage_is_not_wrapped() -> None:
    assert counts_by_cost([1, 4, 3], 1, is_tied=True) == (3,)
    assert units_by_counts([3], 3, 1, is_tied=True) == [StageUnits(range(3))]


def test_a_tied_model_has_one_stage_fewer_than_units_at_most() -> None:
    assert counts_by_cost([1, 4, 3], 2, is_tied=True) == (2, 1)
    for cut_it in (counts_by_cost, lambda units, stages, **tied: units_by_counts(units, 3, stages, **tied)):
        with pytest.raises(ConfigError, match=r"cannot be cut into 3 stages; choose 1 to 2"):
            cut_it([1, 1, 1], 3, is_tied=True)
