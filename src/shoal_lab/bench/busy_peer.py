"""One core's calibration loop, in a process of its own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from shoal.clock import SystemClock
from shoal_lab.bench.peer import Calls, Seat

_SLICE_LOOPS = 20_000
"""About 0.2 ms: shorter than a turn of the scheduler, long against reading the clock twice."""


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer the loop alone, which only the first peer runs, and together."""

    def alone(duration_s: float) -> list[float]:
        return slice_rates(duration_s) if seat.index == 0 else []

    def together(duration_s: float) -> float:
        rates = slice_rates(duration_s)
        return len(rates) / sum(1 / rate for rate in rates)

    yield {"alone": alone, "together": together}


def slice_rates(duration_s: float) -> list[float]:
    """Loop for `duration_s` seconds; return the loops per second of each slice, and leave no time between slices."""
    clock = SystemClock()
    rates: list[float] = []
    now_s = clock.now_s()
    end_s = now_s + duration_s
    while now_s < end_s:
        for _ in range(_SLICE_LOOPS):
            pass
        before_s, now_s = now_s, clock.now_s()
        rates.append(_SLICE_LOOPS / (now_s - before_s))
    return rates
