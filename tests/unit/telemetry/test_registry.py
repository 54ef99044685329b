"""Counters, gauges and histograms."""

from __future__ import annotations

import ast
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import grafana
from tools import metrics as metrics_page

import shoal
from shoal.telemetry.catalogue import CATALOGUE
from shoal.telemetry.registry import (
    FIRST_BUCKET,
    LAST_BUCKET,
    MetricRegistry,
    base_name,
    labels_of,
    quantile,
    upper_bound,
)

_USED = re.compile(r'\.(counter|gauge|histogram)\(\s*"([^"]+)"')


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


def test_a_gauge_is_what_was_said_last_and_is_not_told_before() -> None:
    registry = MetricRegistry()
    gauge = registry.gauge("memory", kind="host")
    assert registry.gauges() == {}
    gauge.set(3.0)
    registry.gauge("memory", kind="host").set(2.0)
    assert registry.gauges() == {"memory{kind=host}": 2.0}


def test_a_histogram_counts_in_few_buckets_whatever_comes() -> None:
    registry = MetricRegistry()
    histogram = registry.histogram("seconds")
    assert registry.histograms() == {}
    for value in (1.0, 1.1, 2.0, 0.0, -1.0, 1e-300, 1e300):
        histogram.observe(value)
    assert registry.histograms() == {"seconds": {FIRST_BUCKET: 3, 0: 2, 4: 1, LAST_BUCKET: 1}}


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_a_quantile_is_right_to_within_a_bucket(share: float) -> None:
    histogram = MetricRegistry().histogram("seconds")
    for number in range(1, 1001):
        histogram.observe(number / 100)
    found = quantile(histogram.counts, share)
    assert found is not None
    assert abs(math.log2(found / (10 * share))) <= 0.25
    assert quantile({}, share) is None


def test_every_number_of_the_product_is_in_the_catalogue_as_what_it_is_and_every_one_there_is_measured() -> None:
    sources = [path.read_text() for path in Path(shoal.__file__).parent.rglob("*.py")]
    used = {(name, kind) for text in sources for kind, name in _USED.findall(text)}
    used |= {(f"transport.{name}", "counter") for name in ("accepted", "dialled")}  # one call with both names
    assert used == {(name, metric.kind.value) for name, metric in CATALOGUE.items()}


def test_the_page_of_metrics_is_that_of_the_catalogue() -> None:
    text = (Path(shoal.__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert text == metrics_page.page(), "write it anew: python tools/metrics.py > docs/metrics.md"


def _labels_in(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and label of each number that this code makes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".counter", ".gauge", ".histogram")):
            for keyword in node.keywords:
                yield ast.literal_eval(node.args[0]), str(keyword.arg)


def test_grafanas_dashboard_is_that_of_the_catalogue() -> None:
    text = (Path(shoal.__file__).parents[2] / "docs" / "grafana.json").read_text()
    assert text == grafana.page(), "write it anew: python tools/grafana.py > docs/grafana.json"


def test_labels_are_those_of_the_catalogue() -> None:
    sources = [path.read_text() for path in Path(shoal.__file__).parent.rglob("*.py")]
    found = {each for text in sources for each in _labels_in(text)}
    assert found == {(name, label) for name, metric in CATALOGUE.items() for label in metric.labels}


def test_a_full_name_says_its_labels() -> None:
    registry = MetricRegistry()
    registry.counter("n", b="x", a=1).add()
    [name] = registry.counts()
    assert (base_name(name), labels_of(name)) == ("n", {"a": "1", "b": "x"})
    assert labels_of("n") == {}


def test_a_bucket_ends_where_the_next_one_begins() -> None:
    assert upper_bound(3) == 2.0
    assert upper_bound(LAST_BUCKET) == math.inf
    histogram = MetricRegistry().histogram("n")
    histogram.observe(upper_bound(3))
    assert histogram.counts == {4: 1}
