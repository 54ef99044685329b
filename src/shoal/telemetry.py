"""Counters of a process: plain numbers, read by whoever exports them.

    metrics = MetricRegistry()
    metrics.counter("transport.refused", offence="tls").add()
    metrics.totals()["transport.refused"]

Safe to use from the event loop and the device thread at once.
"""

from __future__ import annotations

import threading
from collections import Counter as Sums
from collections.abc import Mapping
from dataclasses import dataclass


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


class MetricRegistry:
    """All counters of a process, by name and labels. Asking for the same name and labels gives the same object."""

    def __init__(self) -> None:
        """Start without any counter."""
        self._lock = threading.Lock()
        self._counters: dict[str, Counter] = {}

    def counter(self, name: str, **labels: str | int) -> Counter:
        """Return the counter with this name and these labels."""
        with self._lock:
            return self._counters.setdefault(_full_name(name, labels), Counter(threading.Lock()))

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


def _full_name(name: str, labels: dict[str, str | int]) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f"{label}={value}" for label, value in sorted(labels.items())) + "}"
