"""Counters, gauges and histograms."""

from __future__ import annotations

import math
import random
import threading

import pytest

from shoal.telemetry import MetricRegistry


def test_the_same_name_and_labels_are_the_same_metric() -> None:
    registry = MetricRegistry()
    registry.counter("bytes", traffic="state", hop=1).add(3)
    registry.counter("bytes", hop=1, traffic="state").add(4)
    registry.counter("bytes", traffic="control", hop=1).add(1)
    assert registry.snapshot() == {"bytes{hop=1,traffic=state}": 7, "bytes{hop=1,traffic=control}": 1}


def test_counters_that_counted_are_listed_and_summed_over_their_labels() -> None:
    registry = MetricRegistry()
    registry.counter("refused", offence="tls").add(3)
    registry.counter("refused", offence="slow").add()
    registry.counter("lost")
    assert registry.counts() == {"refused{offence=slow}": 1, "refused{offence=tls}": 3}
    assert registry.totals() == {"refused": 4}
    assert registry.totals()["never"] == 0


def test_a_gauge_appears_once_it_is_set() -> None:
    registry = MetricRegistry()
    gauge = registry.gauge("queue")
    assert registry.snapshot() == {}
    gauge.set(2)
    gauge.set(1)
    assert registry.snapshot() == {"queue": 1}


def test_quantiles_are_close_to_the_exact_ones() -> None:
    rng = random.Random(0)
    values = sorted(rng.lognormvariate(0, 2) for _ in range(5000))
    histogram = MetricRegistry().histogram("t")
    for value in values:
        histogram.observe(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert histogram.quantile(share) == pytest.approx(values[int(share * 5000) - 1], rel=0.05)
    summary = histogram.summary()
    assert (summary["count"], summary["min"], summary["max"]) == (5000, values[0], values[-1])
    assert summary["sum"] == pytest.approx(sum(values))


def test_zeros_and_values_that_are_not_finite_do_no_harm() -> None:
    histogram = MetricRegistry().histogram("t")
    assert math.isnan(histogram.quantile(0.5))
    for value in (0.0, 0.0, 0.0, 8.0, math.nan, math.inf):
        histogram.observe(value)
    assert histogram.summary()["p50"] == 0.0
    assert histogram.quantile(1.0) == pytest.approx(8.0, rel=0.05)
    assert histogram.count == 4


def test_additions_of_two_threads_are_all_counted() -> None:
    counter = MetricRegistry().counter("n")

    def add_many() -> None:
        for _ in range(20_000):
            counter.add()

    threads = [threading.Thread(target=add_many) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 40_000
