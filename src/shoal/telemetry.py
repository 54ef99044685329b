"""Counters, gauges and histograms of a process: plain numbers, read by whoever exports them.

    metrics = MetricRegistry()
    metrics.counter("transport.refused", offence="tls").add()
    metrics.gauge("queue.length", stage=0).set(3)
    metrics.histogram("round.duration_s").observe(1.7)
    metrics.snapshot()

Safe to use from the event loop and the device thread at once.
"""

from __future__ import annotations

import math
import threading
from collections import Counter as Sums
from collections.abc import Mapping
from dataclasses import dataclass, field

# Histogram buckets grow by 2 ** (1 / 8): a quantile is off by at most 4.5 %.
_BUCKETS_PER_OCTAVE = 8


@dataclass(slots=True)
class Counter:
    """A sum that only grows."""

    _lock: threading.Lock
    _value: int = 0

    def add(self, amount: int = 1) -> None:
        """Add a non-negative amount."""
        with self._lock:
            self._value += amount

    @property
    def value(self) -> int:
        """The sum so far."""
        return self._value


@dataclass(slots=True)
class Gauge:
    """The latest of a changing value; NaN until it is set."""

    value: float = math.nan

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


@dataclass(slots=True)
class Histogram:
    """How values are distributed; the memory it takes does not grow with their number."""

    _lock: threading.Lock
    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    _buckets: dict[int, int] = field(default_factory=dict[int, int])
    _num_not_positive: int = 0

    def observe(self, value: float) -> None:
        """Count one value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        with self._lock:
            self.count += 1
            self.total += value
            self.least = min(self.least, value)
            self.most = max(self.most, value)
            if value <= 0:
                self._num_not_positive += 1
            else:
                bucket = math.floor(math.log2(value) * _BUCKETS_PER_OCTAVE)
                self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def quantile(self, share: float) -> float:
        """Return the value below which `share` (0..1) of the observed ones lie; NaN if there are none."""
        with self._lock:
            if self.count == 0:
                return math.nan
            rank = max(1, math.ceil(share * self.count))
            seen = self._num_not_positive
            if seen >= rank:
                return min(self.least, 0.0)
            for bucket in sorted(self._buckets):
                seen += self._buckets[bucket]
                if seen >= rank:
                    middle = 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE)
                    return min(max(middle, self.least), self.most)
            return self.most

    def summary(self) -> dict[str, float]:
        """Return count, sum, extremes and the usual quantiles; only count and sum while it is empty."""
        if self.count == 0:
            return {"count": 0, "sum": 0.0}
        quantiles = {f"p{percent}": self.quantile(percent / 100) for percent in (50, 90, 99)}
        return {"count": self.count, "sum": self.total, "min": self.least, "max": self.most, **quantiles}


class MetricRegistry:
    """All metrics of a process, by name and labels. Asking for the same name and labels gives the same object."""

    def __init__(self) -> None:
        """Start without any metric."""
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def counter(self, name: str, **labels: str | int) -> Counter:
        """Return the counter with this name and these labels."""
        with self._lock:
            return self._counters.setdefault(_full_name(name, labels), Counter(threading.Lock()))

    def gauge(self, name: str, **labels: str | int) -> Gauge:
        """Return the gauge with this name and these labels."""
        with self._lock:
            return self._gauges.setdefault(_full_name(name, labels), Gauge())

    def histogram(self, name: str, **labels: str | int) -> Histogram:
        """Return the histogram with this name and these labels."""
        with self._lock:
            return self._histograms.setdefault(_full_name(name, labels), Histogram(threading.Lock()))

    def counts(self) -> dict[str, int]:
        """Return the counters that have counted something, by full name (`name{label=value}`)."""
        with self._lock:
            return {name: counter.value for name, counter in sorted(self._counters.items()) if counter.value}

    def totals(self) -> Mapping[str, int]:
        """Return the counters by name, summed over their labels; 0 for a name that was never counted."""
        sums = Sums[str]()
        for name, value in self.counts().items():
            sums[name.partition("{")[0]] += value
        return sums

    def snapshot(self) -> dict[str, float | dict[str, float]]:
        """Return all values now, by full name (`name{label=value}`); gauges that were never set are left out."""
        with self._lock:
            counters, gauges, histograms = dict(self._counters), dict(self._gauges), dict(self._histograms)
        values: dict[str, float | dict[str, float]] = {name: counter.value for name, counter in counters.items()}
        values |= {name: gauge.value for name, gauge in gauges.items() if not math.isnan(gauge.value)}
        values |= {name: histogram.summary() for name, histogram in histograms.items()}
        return values


def _full_name(name: str, labels: dict[str, str | int]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f"{label}={value}" for label, value in sorted(labels.items())) + "}"
