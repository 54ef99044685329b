"""What a device's time is counted as."""

from __future__ import annotations

from tests.set_clock import SetClock

from shoal.ids import StepKey
from shoal.pipeline.device_meter import DeviceMeter
from shoal.swarm.step_operations import OperationKind
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.messages.step import StepEntry


def test_work_is_counted_by_kind_and_open_steps_as_one_time_however_many_there_are() -> None:
    metrics, clock = MetricRegistry(), SetClock(5.0)
    meter = DeviceMeter(metrics, 2, clock)
    meter.worked(OperationKind.FORWARD, 0.25)
    meter.worked(OperationKind.FORWARD, 0.5)
    meter.worked(OperationKind.WEIGHTS, 0.125)
    meter.open(set())
    first, second = StepKey(0, 0, 0, 0), StepKey(1, 0, 0, 0)
    opened: list[tuple[float, set[StepKey]]] = [
        (6.0, {first}),
        (7.0, {first, second}),
        (8.0, {second}),
        (9.0, set()),
        (21.0, {first}),
        (21.5, set()),
    ]
    for time_s, steps in opened:
        clock.now = time_s
        meter.open(steps)
    assert metrics.counts() == {
        "device.busy_us{kind=forward,stage=2}": 750_000,
        "device.busy_us{kind=weights,stage=2}": 125_000,
        "device.open_us{stage=2}": 3_500_000,
    }
    # Twice 2 s, and half a second: 2 and 1/2 begin the buckets 4 and -4.
    assert metrics.histograms() == {"step.open_seconds{stage=2}": {-4: 1, 4: 2}}


def test_a_clock_that_does_not_move_counts_nothing() -> None:
    metrics = MetricRegistry()
    meter = DeviceMeter(metrics, 0, SetClock(5.0))
    meter.worked(OperationKind.COMMIT, -1e-9)
    meter.open({StepKey(0, 0, 0, 0)})
    meter.open(set())
    assert metrics.counts() == {}


def test_steps_are_counted_and_of_those_that_were_not_skipped_the_samples() -> None:
    metrics = MetricRegistry()
    meter = DeviceMeter(metrics, 2, SetClock(5.0))
    meter.committed(())
    for num_samples, skipped in ((4, False), (3, True)):
        meter.committed([StepEntry(StepKey(0, 0, 0, 0), (), 0, (), num_samples, num_samples, 1.0, 0.1, skipped)])
    assert metrics.counts() == {"step.committed{stage=2}": 2, "step.samples{stage=2}": 4}
