"""The numbers of a run in lines."""

from __future__ import annotations

import math

import pytest

from shoal.cli.screen.layout import ASCII_LEVELS, LEVELS, sparkline


def test_a_sparkline_has_eight_levels_from_the_least_to_the_most() -> None:
    assert len(set(LEVELS)) == len(set(ASCII_LEVELS)) == 8
    assert sparkline([float(value) for value in range(8)], 20) == LEVELS
    assert sparkline([7.0, 0.0], 20) == LEVELS[-1] + LEVELS[0]


def test_more_values_than_characters_are_means() -> None:
    assert sparkline([0.0, 2.0, 5.0, 9.0], 2) == LEVELS[0] + LEVELS[-1]
    assert len(sparkline([float(value) for value in range(1000)], 32)) == 32


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_without_a_finite_value_there_is_none(values: list[float]) -> None:
    assert sparkline(values, 10) == ""


def test_values_that_are_all_the_same_are_no_hill() -> None:
    assert sparkline([2.5] * 5, 10) == LEVELS[0] * 5


def test_the_largest_numbers_there_are_make_no_difference() -> None:
    most = 1.7e308
    assert sparkline([-most, most], 10) == LEVELS[0] + LEVELS[-1]
