"""How busy a replica's device is, as counters of its process: microseconds by kind of operation, and of open steps.

    device.busy_us{kind=forward,stage=0}   the device has worked on such operations
    device.open_us{stage=0}                some step was open here, from its Open to its commit (or its end otherwise)

Of the time in which a step is open, what is not busy is the bubble: waiting for inputs, for gradients, for the commit.
"""

from __future__ import annotations

from shoal.clock import Clock
from shoal.swarm.step_operations import OperationKind
from shoal.telemetry import Counter, MetricRegistry


class DeviceMeter:
    """Of one replica; for its event loop."""

    def __init__(self, metrics: MetricRegistry, stage: int, clock: Clock) -> None:
        self._busy = {
            kind: metrics.counter("device.busy_us", kind=kind.name.lower(), stage=stage) for kind in OperationKind
        }
        self._open = metrics.counter("device.open_us", stage=stage)
        self._clock = clock
        self._opened_s: float | None = None

    def worked(self, kind: OperationKind, duration_s: float) -> None:
        """The device has done an operation."""
        _add(self._busy[kind], duration_s)

    def open(self, is_open: bool) -> None:
        """Whether some step is open now."""
        if is_open and self._opened_s is None:
            self._opened_s = self._clock.now_s()
        elif not is_open and self._opened_s is not None:
            _add(self._open, self._clock.now_s() - self._opened_s)
            self._opened_s = None


def _add(counter: Counter, duration_s: float) -> None:
    counter.add(max(0, round(duration_s * 1e6)))
