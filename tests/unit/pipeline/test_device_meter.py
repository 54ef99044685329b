"""What a device's time is counted as."""

from __future__ import annotations

from shoal.pipeline.device_meter import DeviceMeter
from shoal.swarm.step_operations import OperationKind
from shoal.telemetry import MetricRegistry


class Hands:
    """A clock that is set."""

    def __init__(self) -> None:
        self.time_s = 5.0

    def now_s(self) -> float:
        return self.time_s

    def unix_s(self) -> float:
        return self.time_s

    async def sleep_s(self, duration_s: float) -> None:
        self.time_s += duration_s


def test_work_is_counted_by_kind_and_open_steps_as_one_time_however_many_there_are() -> None:
    metrics, clock = MetricRegistry(), Hands()
    meter = DeviceMeter(metrics, 2, clock)
    meter.worked(OperationKind.FORWARD, 0.25)
    meter.worked(OperationKind.FORWARD, 0.5)
    meter.worked(OperationKind.WEIGHTS, 0.125)
    meter.open(False)
    for time_s, is_open in ((6.0, True), (7.0, True), (9.0, False), (20.0, False), (21.0, True), (21.5, False)):
        clock.time_s = time_s
        meter.open(is_open)
    assert metrics.counts() == {
        "device.busy_us{kind=forward,stage=2}": 750_000,
        "device.busy_us{kind=weights,stage=2}": 125_000,
        "device.open_us{stage=2}": 3_500_000,
    }


def test_a_clock_that_does_not_move_counts_nothing() -> None:
    metrics = MetricRegistry()
    meter = DeviceMeter(metrics, 0, Hands())
    meter.worked(OperationKind.COMMIT, -1e-9)
    meter.open(True)
    meter.open(False)
    assert metrics.counts() == {}
