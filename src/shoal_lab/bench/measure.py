"""Measures cases: ours and the reference take turns, so that whatever the machine does meanwhile meets both."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from shoal_lab.bench.case import Case

Progress = Callable[[str], None]
"""Told in words what is measured now."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The values of one case, in the order in which they were measured.

    Attributes:
        ours: one value for each repetition.
        reference: likewise; empty: there is nothing to compare with.
        larger_is_better: says which way a ratio goes.
    """

    case: str
    unit: str
    ours: tuple[float, ...]
    reference: tuple[float, ...]
    larger_is_better: bool

    @property
    def ours_median(self) -> float:
        """The middle one of our values."""
        return statistics.median(self.ours)

    @property
    def reference_median(self) -> float | None:
        """The middle one of the reference's values; None without a reference."""
        return statistics.median(self.reference) if self.reference else None

    @property
    def ratio(self) -> float | None:
        """How many times better ours is, by the medians; None without a reference."""
        reference = self.reference_median
        return None if reference is None else better_by(self.ours_median, reference, self.larger_is_better)


def better_by(ours: float, reference: float, larger_is_better: bool) -> float | None:
    """Return how many times better `ours` is: above 1 it is better, below 1 worse, whatever the unit's direction.

    None where the value below the line is zero, so that there is no such number.
    """
    above, below = (ours, reference) if larger_is_better else (reference, ours)
    return above / below if below else None


def measure(case: Case, repeat: int, progress: Progress) -> Measurement:
    """Measure one case: an unmeasured repetition of each side, then ours and the reference by turns."""
    sides = [case.ours] if case.reference is None else [case.ours, case.reference]
    values: list[list[float]] = [[] for _ in sides]
    for repetition in range(repeat + 1):
        progress(f"{case.name}: " + (f"{repetition} of {repeat}" if repetition else "warm-up"))
        for side, kept in zip(sides, values, strict=True):
            value = side()
            if repetition:
                kept.append(value)
    return Measurement(
        case=case.name,
        unit=case.unit,
        ours=tuple(values[0]),
        reference=tuple(values[1]) if len(values) > 1 else (),
        larger_is_better=case.larger_is_better,
    )


class Turns:
    """Turns that serve several cases: the n-th repetition of each case reads the n-th turn.

    Args:
        take: takes a turn; returns its figures by name.
        warms_up: a turn is measured from the first one on: the repetition that is not measured reads that one too.

    Attributes:
        taken: the figures of all turns so far.
    """

    def __init__(self, take: Callable[[], Mapping[str, float]], *, warms_up: bool = True) -> None:
        self.taken: list[Mapping[str, float]] = []
        self._take = take
        self._begin = () if warms_up else (0,)

    def reader(self, key: str) -> Callable[[], float]:
        """Return the side of a case that reads one figure of each turn."""
        numbers = chain(self._begin, count())

        def read() -> float:
            number = next(numbers)
            while len(self.taken) <= number:
                self.taken.append(self._take())
            return self.taken[number][key]

        return read


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("nothing was measured")
    return float(np.quantile(values, share, method="inverted_cdf"))


def seconds_per_call(call: Callable[[], object], stopwatch: Callable[[], float], at_least_s: float) -> float:
    """Return the mean seconds that a call takes, over as many calls as last at least `at_least_s` together.

    Args:
        stopwatch: Seconds since whenever: of a clock, or those for which this thread has computed.
    """
    num_calls = 0
    start_s = now_s = stopwatch()
    while now_s - start_s < at_least_s or not num_calls:
        call()
        num_calls += 1
        now_s = stopwatch()
    return (now_s - start_s) / num_calls
