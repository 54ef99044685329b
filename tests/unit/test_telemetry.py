"""Counters."""

from __future__ import annotations

import threading

from shoal.telemetry import MetricRegistry


def test_the_same_name_and_labels_are_the_same_counter() -> None:
    registry = MetricRegistry()
    registry.counter("bytes", traffic="state", hop=1).add(3)
    registry.counter("bytes", hop=1, traffic="state").add(4)
    registry.counter("bytes", traffic="control", hop=1).add(1)
    assert registry.counts() == {"bytes{hop=1,traffic=state}": 7, "bytes{hop=1,traffic=control}": 1}


def test_counters_that_counted_are_listed_and_summed_over_their_labels() -> None:
    registry = MetricRegistry()
    registry.counter("refused", offence="tls").add(3)
    registry.counter("refused", offence="slow").add()
    registry.counter("lost")
    assert registry.counts() == {"refused{offence=slow}": 1, "refused{offence=tls}": 3}
    assert registry.totals() == {"refused": 4}
    assert registry.totals()["never"] == 0


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
