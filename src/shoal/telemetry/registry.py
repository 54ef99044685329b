"""The numbers of a process: counters, gauges and histograms, read by whoever exports them.

    metrics = MetricRegistry()
    metrics.counter("transport.refused", offence="tls").add()
    metrics.totals()["transport.refused"]
    metrics.gauge("process.memory_bytes").set(2e8)
    metrics.histogram("step.open_seconds", stage=0).observe(0.2)

`catalogue.CATALOGUE` has all that the product measures. Safe to use from the event loop and the device thread at once.
"""

from __future__ import annotations

import math
import threading
from collections import Counter as Sums
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.clock import SystemClock


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
    """A number as it is now; None until it is known."""

    value: float | None = None

    def set(self, value: float) -> None:
        """Say what it is now."""
        self.value = float(value)


FIRST_BUCKET, LAST_BUCKET = -64, 63
BUCKETS_A_DOUBLING: Final = 4


@dataclass(slots=True)
class Histogram:
    """How often values came, in buckets that are each 19 % wider than the one before.

    Bucket 0 begins at 1; what is below or above all buckets is in the first or last one. In seconds that is from 15 us
    to 18 hours.
    """

    _lock: threading.Lock
    _counts: dict[int, int] = field(default_factory=dict[int, int])

    def observe(self, value: float) -> None:
        """Count a value."""
        bucket = FIRST_BUCKET if value <= 0 else math.floor(BUCKETS_A_DOUBLING * math.log2(value))
        bucket = min(max(bucket, FIRST_BUCKET), LAST_BUCKET)
        with self._lock:
            self._counts[bucket] = self._counts.get(bucket, 0) + 1

    @property
    def counts(self) -> dict[int, int]:
        """How many values came, by bucket; of those without any nothing is said."""
        with self._lock:
            return dict(sorted(self._counts.items()))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """Return the value below which this share of a histogram's values is, to within a bucket; None without values."""
    left = share * sum(counts.values())
    for bucket, count in sorted(counts.items()):
        left -= count
        if left <= 0 and count:
            return 2.0 ** ((bucket + 0.5) / BUCKETS_A_DOUBLING)
    return None


class MetricRegistry:
    """All numbers of a process, by name and labels. Asking for the same name and labels gives the same object.

    Attributes:
        began_unix_s: since when it counts, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.began_unix_s = SystemClock().unix_s()
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

    def gauges(self) -> dict[str, float]:
        """Return the gauges that are known, by full name."""
        with self._lock:
            return {name: each.value for name, each in sorted(self._gauges.items()) if each.value is not None}

    def histograms(self) -> dict[str, dict[int, int]]:
        """Return the counts of the histograms that have any, by full name and bucket."""
        with self._lock:
            known = sorted(self._histograms.items())
        return {name: counts for name, each in known if (counts := each.counts)}

    def counts(self) -> dict[str, int]:
        """Return the counters that have counted something, by full name (`name{label=value}`)."""
        with self._lock:
            return {name: counter.value for name, counter in sorted(self._counters.items()) if counter.value}

    def totals(self) -> Mapping[str, int]:
        """Return the counters by name, summed over their labels; 0 for a name that was never counted."""
        return totals_of(self.counts())


def totals_of(counts: Mapping[str, int]) -> Sums[str]:
    """Return counts by name, summed over their labels; 0 for a name that is not among them."""
    sums = Sums[str]()
    for name, value in counts.items():
        sums[base_name(name)] += value
    return sums


def base_name(full_name: str) -> str:
    """Return a full name without its labels."""
    return full_name.partition("{")[0]


def labels_of(full_name: str) -> dict[str, str]:
    """Return the labels in a full name."""
    inside = full_name.partition("{")[2].removesuffix("}")
    pairs = (pair.partition("=") for pair in inside.split(",") if pair)
    return {label: value for label, _, value in pairs}


def upper_bound(bucket: int) -> float:
    """Return the value that all values of a histogram's bucket are below; infinity for the last one."""
    return math.inf if bucket >= LAST_BUCKET else 2.0 ** ((bucket + 1) / BUCKETS_A_DOUBLING)


def _full_name(name: str, labels: dict[str, str | int]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f"{label}={value}" for label, value in sorted(labels.items())) + "}"
