"""Deadlines of round boundaries."""

from __future__ import annotations

import pytest

from shoal.swarm.round_boundary import boundary_s, deadline_s


def test_the_first_deadline_holds_until_three_rounds_are_known() -> None:
    assert deadline_s([], 3.0, 60.0) == 60.0
    assert deadline_s([1.0, 2.0], 3.0, 60.0) == 60.0


def test_later_it_is_the_median_and_some_deviations() -> None:
    assert deadline_s([10.0, 11.0, 13.0], 3.0, 60.0) == pytest.approx(11.0 + 3.0 * 1.0)


def test_one_extreme_round_hardly_moves_it() -> None:
    assert deadline_s([10.0, 11.0, 12.0, 1000.0], 2.0, 60.0) < 20.0


def test_a_boundary_is_never_closer_than_half_above_the_median() -> None:
    assert boundary_s([], 60.0) == 60.0
    assert boundary_s([10.0, 10.0, 10.0], 60.0) == pytest.approx(15.0)
    assert boundary_s([10.0, 11.0, 13.0], 60.0) == pytest.approx(11.0 + 8.0 * 1.0)
