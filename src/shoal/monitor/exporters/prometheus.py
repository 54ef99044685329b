"""What Prometheus reads when it looks: the newest numbers of the run and of each peer, in its text form.

Names and units are those of the catalogue as Prometheus wants them: `device.busy_us` of a server is
`shoal_device_busy_seconds_total{who="server 1@box2",role="server",...}`, `loss/train` is `shoal_run_loss{of="train"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from shoal.monitor.exporters.base import Newest, PeerReport
from shoal.telemetry.catalogue import CATALOGUE, RUN, MetricKind, outside_name, outside_run_name, outside_scale
from shoal.telemetry.registry import BUCKETS_A_DOUBLING, FIRST_BUCKET, LAST_BUCKET, base_name, labels_of, upper_bound
from shoal.wire.messages.control import MetricReport

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_Value = TypeVar("_Value")


def exposition(newest: Newest) -> bytes:
    """Return the text, without what the catalogue does not have; of two peers with one name the later one counts."""
    return generate_latest(_Numbers(newest))


class _Numbers(Collector):
    def __init__(self, newest: Newest) -> None:
        self._newest = newest

    def collect(self) -> Iterator[Family]:
        yield from _of_run(self._newest.run)
        for name in CATALOGUE:
            yield from _of_peers(name, self._newest.peers)


def _of_run(values: Mapping[str, float]) -> Iterator[Family]:
    for base, number in RUN.items():
        labels = [number.label] if number.label else []
        family = GaugeMetricFamily(outside_run_name(base), _sentence(number.help), labels=labels)
        for name, value in values.items():
            first, _, rest = name.partition("/")
            if first == base and (number.label or not rest):
                family.add_metric([rest] if number.label else [], value)
        if family.samples:
            yield family


def _of_peers(name: str, peers: tuple[PeerReport, ...]) -> Iterator[Family]:
    """Yield one kind of number of all peers, if any has it."""
    metric = CATALOGUE[name]
    labels = ["who", "role", *metric.labels]
    outside, text, scale = outside_name(name), _sentence(metric.help), outside_scale(name)
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    match metric.kind:
        case MetricKind.COUNTER:
            family = CounterMetricFamily(outside, text, labels=labels)
            for values, count in _values(name, peers, lambda report: report.counters):
                family.add_metric(values, count * scale)
        case MetricKind.GAUGE:
            family = GaugeMetricFamily(outside, text, labels=labels)
            for values, value in _values(name, peers, lambda report: report.gauges):
                family.add_metric(values, value * scale)
        case MetricKind.HISTOGRAM:
            family = HistogramMetricFamily(outside, text, labels=labels)
            for values, counts in _values(name, peers, lambda report: report.histograms):
                # Only buckets travel, so there is no sum, and no mean: quantiles are what they are for.
                family.add_metric(values, _cumulative(counts), None)
    if family.samples:
        yield family


def _values(
    name: str, peers: tuple[PeerReport, ...], kind: Callable[[MetricReport], Mapping[str, _Value]]
) -> Iterator[tuple[list[str], _Value]]:
    """Yield the values of labels, and the number that has them, each combination once."""
    wanted = CATALOGUE[name].labels
    found: dict[tuple[str, ...], _Value] = {}
    for who, report in peers:
        for full_name, value in kind(report).items():
            labels = labels_of(full_name)
            # A peer may say anything: other labels would break the page for all.
            if base_name(full_name) == name and labels.keys() <= set(wanted):
                found[(who, report.role, *(labels.get(label, "") for label in wanted))] = value
    for values, value in found.items():
        yield list(values), value


def _cumulative(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """Return how many values are at most each power of two, and how many there are in all.

    Always of the same bounds: Prometheus adds up peers, and looks back, bound by bound.
    """
    buckets = list[tuple[str, float]]()
    total = 0
    for bucket in range(FIRST_BUCKET, LAST_BUCKET):
        total += counts.get(bucket, 0)
        if (bucket + 1) % BUCKETS_A_DOUBLING == 0:
            buckets.append((f"{upper_bound(bucket):.6g}", total))
    return [*buckets, ("+Inf", total + counts.get(LAST_BUCKET, 0))]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
