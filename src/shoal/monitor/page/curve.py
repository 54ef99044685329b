"""A curve of any length in bounded memory: of each bucket of values the least and the most. Pure.

values --> the last bucket, until it has `stride` of them --> the next one
           all buckets full: two become one, and `stride` doubles

A peak is never lost, however long the run. `static/curve.js` does the same in the browser, and goes on where this ends.
"""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, ...]
"""Where a value is, by time or by samples, and the value last."""


class Curve:
    """The values of one number over a run."""

    def __init__(self, max_buckets: int) -> None:
        """Start empty; `max_buckets` is even."""
        self._max_buckets = max_buckets
        self._stride = 1
        self._count = 1
        self._buckets: list[tuple[Point, ...]] = []

    def add(self, point: Point) -> None:
        """Take the next value."""
        if self._buckets and self._count < self._stride:
            self._count += 1
            last = self._buckets[-1]
            # Most are between the two.
            if not min(last[0][-1], last[-1][-1]) <= point[-1] <= max(last[0][-1], last[-1][-1]):
                self._buckets[-1] = _extremes((*last, point))
            return
        if len(self._buckets) == self._max_buckets:
            pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
            self._buckets = [_extremes((*one, *other)) for one, other in pairs]
            self._stride *= 2
        self._count = 1
        self._buckets.append((point,))

    def form(self) -> dict[str, object]:
        """Return what `static/curve.js` reads: each bucket is its points in one list."""
        buckets = [[number for point in bucket for number in point] for bucket in self._buckets]
        return {
            "max": self._max_buckets,
            "stride": self._stride,
            "count": self._count,
            "buckets": buckets,
        }


def _extremes(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the lowest and the highest of these points, in their order; one, if all are as high."""
    lowest, highest = points[0], points[0]
    is_falling = False
    for point in points[1:]:
        if point[-1] < lowest[-1]:
            lowest, is_falling = point, True
        elif point[-1] > highest[-1]:
            highest, is_falling = point, False
    if lowest is highest:
        return (lowest,)
    return (highest, lowest) if is_falling else (lowest, highest)
