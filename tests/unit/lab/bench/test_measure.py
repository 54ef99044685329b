"""Ratios, turns, warm-ups and percentiles of a measurement: these are values that were measured, and never too low."""

from __future__ import annotations

from itertools import count

import pytest

from shoal_lab.bench.case import Case
from shoal_lab.bench.measure import Measurement, Turns, better_by, measure, percentile, seconds_per_call


@pytest.mark.parametrize(
    ("ours", "reference", "larger_is_better", "ratio"),
    [
        (3.0, 1.5, True, 2.0),  # twice the rate
        (1.5, 3.0, True, 0.5),
        (3.0, 1.5, False, 0.5),  # twice the time
        (1.5, 3.0, False, 2.0),
        (1.0, 1.0, True, 1.0),
        (1.0, 0.0, True, None),
        (0.0, 1.0, False, None),
    ],
)
def test_a_ratio_above_one_means_that_ours_is_better_whatever_the_unit(
    ours: float, reference: float, larger_is_better: bool, ratio: float | None
) -> None:
    assert better_by(ours, reference, larger_is_better) == ratio


def test_the_ratio_is_that_of_the_medians() -> None:
    measured = Measurement("x", "GB/s", ours=(9.0, 2.0, 4.0), reference=(1.0, 2.0, 90.0), larger_is_better=True)
    assert (measured.ours_median, measured.reference_median, measured.ratio) == (4.0, 2.0, 2.0)


def test_without_a_reference_there_is_no_ratio() -> None:
    measured = measure(Case("x", "s", lambda: 1.0, None), 2, lambda what: None)
    assert (measured.ours, measured.reference, measured.ratio) == ((1.0, 1.0), (), None)
    assert measured.reference_median is None


def test_ours_and_the_reference_take_turns_after_a_warm_up_of_each_that_is_not_measured() -> None:
    turns: list[str] = []
    numbers = count()

    def side(name: str) -> float:
        turns.append(name)
        return float(next(numbers))

    said: list[str] = []
    case = Case("x", "s", lambda: side("A"), lambda: side("B"))
    measured = measure(case, 3, said.append)
    assert "".join(turns) == "AB" * 4
    assert (measured.ours, measured.reference) == ((2.0, 4.0, 6.0), (3.0, 5.0, 7.0))
    assert said == ["x: warm-up", "x: 1 of 3", "x: 2 of 3", "x: 3 of 3"]


class _Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        raise AssertionError("intervals are not measured by the wall clock")

    async def sleep_s(self, duration_s: float) -> None:
        raise AssertionError


@pytest.mark.parametrize(("call_s", "calls"), [(0.03, 4), (5.0, 1)])
def test_short_calls_are_repeated_and_the_mean_is_returned(call_s: float, calls: int) -> None:
    clock = _Clock()
    made: list[None] = []

    def call() -> None:
        made.append(None)
        clock.time_s += call_s

    assert seconds_per_call(call, clock.now_s, 0.1) == pytest.approx(call_s)
    assert len(made) == calls


def test_the_cases_of_one_repetition_read_the_same_turn() -> None:
    numbers = count()
    turns = Turns(lambda: {"a": (number := next(numbers)), "b": 10.0 + number})
    first, second = turns.reader("a"), turns.reader("b")
    assert [first(), first()] == [0, 1]
    assert [second(), second(), second()] == [10, 11, 12]
    assert first() == 2


def test_a_turn_that_needs_no_warm_up_is_read_for_it_as_well() -> None:
    numbers = count()
    read = Turns(lambda: {"a": next(numbers)}, warms_up=False).reader("a")
    assert [read(), read(), read()] == [0, 0, 1]


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
