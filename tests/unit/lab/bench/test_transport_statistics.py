"""Percentiles are values that were measured, and never one too low."""

from __future__ import annotations

import pytest

from shoal_lab.bench.transport_statistics import percentile


@pytest.mark.parametrize(
    ("num_values", "expected"),
    [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (150, 149), (1000, 990)],
)
def test_the_99th_percentile_is_the_smallest_value_that_99_percent_do_not_exceed(
    num_values: int, expected: int
) -> None:
    assert percentile([float(value) for value in range(num_values, 0, -1)], 0.99) == expected


def test_of_nothing_there_is_no_percentile() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        percentile([], 0.99)
