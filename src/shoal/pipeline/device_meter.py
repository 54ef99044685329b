"""How busy a replica's device is, in the numbers of its process: microseconds by kind of operation, and of open steps.

    device.busy_us{kind=forward,stage=0}   the device has worked on such operations
    device.open_us{stage=0}                some step was open here, from its Open to its commit (or its end otherwise)
    step.open_seconds{stage=0}             how long each step was
    step.committed{stage=0}, step.samples{stage=0}

Of the time in which a step is open, what is not busy is the bubble: waiting for inputs, for gradients, for the commit.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from shoal.clock import Clock
from shoal.ids import StepKey
from shoal.swarm.step_operations import OperationKind
from shoal.telemetry.registry import Counter, MetricRegistry
from shoal.wire.messages.step import StepEntry


class DeviceMeter:
    """Of one replica; for its event loop."""

    def __init__(self, metrics: MetricRegistry, stage: int, clock: Clock) -> None:
        self._busy = {
            kind: metrics.counter("device.busy_us", kind=kind.name.lower(), stage=stage) for kind in OperationKind
        }
        self._open = metrics.counter("device.open_us", stage=stage)
        self._clock = clock
        self._each = metrics.histogram("step.open_seconds", stage=stage)
        self._steps = metrics.counter("step.committed", stage=stage)
        self._samples = metrics.counter("step.samples", stage=stage)
        self._open_from_s = 0.0
        self._since_s: dict[StepKey, float] = {}

    def worked(self, kind: OperationKind, duration_s: float) -> None:
        """The device has done an operation."""
        _add(self._busy[kind], duration_s)

    def open(self, steps: Set[StepKey]) -> None:
        """These steps are open now; called at every turn of the worker, and mostly nothing has changed."""
        if steps == self._since_s.keys():
            return
        now_s = self._clock.now_s()
        if steps and not self._since_s:
            self._open_from_s = now_s
        if self._since_s and not steps:
            _add(self._open, now_s - self._open_from_s)
        for key in self._since_s.keys() - steps:
            self._each.observe(now_s - self._since_s.pop(key))
        for key in steps - self._since_s.keys():
            self._since_s[key] = now_s

    def committed(self, entries: Sequence[StepEntry]) -> None:
        """These steps are committed now."""
        self._steps.add(len(entries))
        self._samples.add(sum(entry.num_samples for entry in entries if not entry.skipped))


def _add(counter: Counter, duration_s: float) -> None:
    counter.add(max(0, round(duration_s * 1e6)))
