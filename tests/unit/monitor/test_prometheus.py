"""What Prometheus reads."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.monitor.exporters.base import Newest, PeerReport
from shoal.monitor.exporters.prometheus import exposition
from shoal.telemetry.catalogue import CATALOGUE, RUN, MetricKind
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.messages.control import MetricReport


def _everything() -> bytes:
    """One of each number that there is."""
    metrics = MetricRegistry()
    for name, metric in CATALOGUE.items():
        labels = dict.fromkeys(metric.labels, "a")
        match metric.kind:
            case MetricKind.COUNTER:
                metrics.counter(name, **labels).add(3)
            case MetricKind.GAUGE:
                metrics.gauge(name, **labels).set(2.5)
            case MetricKind.HISTOGRAM:
                metrics.histogram(name, **labels).observe(0.1)
    report = MetricReport("server", metrics.counts(), metrics.gauges(), metrics.histograms())
    run = {f"{name}/a" if number.label else name: 1.0 for name, number in RUN.items()}
    return exposition(Newest(run, (PeerReport("server 1@box2", report),)))


def _samples(text: bytes) -> dict[str, float]:
    families = list(text_string_to_metric_families(text.decode()))
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value for each in families for sample in each.samples
    }


def test_every_number_that_there_is_is_told_with_help_and_in_base_units() -> None:
    text = _everything().decode()
    assert len(re.findall(r"^# HELP ", text, re.M)) == len(CATALOGUE) + len(RUN)
    assert 'shoal_device_busy_seconds_total{kind="a",role="server",stage="a",who="server 1@box2"} 3e-06' in text
    assert 'shoal_run_loss{of="a"} 1.0' in text
    assert "shoal_run_step_seconds 1.0" in text
    assert "_us" not in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of Debian's package prometheus")
def test_the_checker_of_prometheus_has_nothing_to_say() -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=_everything(), capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_buckets_of_a_histogram_add_up() -> None:
    report = MetricReport("server", {}, {}, {"step.open_seconds{stage=0}": {-4: 2, 0: 1, 63: 1}})
    buckets = _samples(exposition(Newest({}, (PeerReport("server 0", report),))))
    of = {re.findall(r"'le', '([^']*)'", name)[0]: value for name, value in buckets.items()}
    assert (of["0.5"], of["1"], of["2"], of["16384"], of["+Inf"]) == (0.0, 2.0, 3.0, 3.0, 4.0)
    assert list(of.values()) == sorted(of.values())


def test_all_peers_tell_the_same_buckets_so_that_they_can_be_added_up() -> None:
    peers = (MetricReport("server", {}, {}, {"data.wait_seconds": {bucket: 1}}) for bucket in (0, 9))
    text = exposition(Newest({}, tuple(PeerReport(f"server {i}", each) for i, each in enumerate(peers)))).decode()
    bounds = [re.findall(rf'le="([^"]*)".*who="server {i}"', text) for i in range(2)]
    assert bounds[0] == bounds[1]


def test_numbers_that_are_none_of_the_catalogue_and_labels_that_it_does_not_know_are_left_out() -> None:
    odd = {"transport.dropped": 1, "transport.lost{cause=a,other=b}": 1, "odd": 1, "transport.lost{cause=}": 2}
    run = {"odd": 1.0, "lr/odd": 1.0, "samples": 1.0, "samples_per_s": 2.0, "samples_per_s/baseline": 3.0}
    found = _samples(exposition(Newest(run, (PeerReport("server 0", MetricReport("server", odd, {"odd": 1.0}, {})),))))
    assert {name.partition("[")[0]: value for name, value in found.items()} == {
        "shoal_run_samples": 1.0,
        "shoal_run_samples_per_second": 3.0,
        "shoal_transport_dropped_total": 1.0,
        "shoal_transport_lost_total": 2.0,
    }


def test_of_two_peers_with_one_name_the_later_one_counts() -> None:
    reports = [PeerReport("server 0", MetricReport("server", {"transport.dropped": n}, {}, {})) for n in (1, 2)]
    assert list(_samples(exposition(Newest({}, tuple(reports)))).values()) == [2.0]
    assert exposition(Newest({}, ())) == b""
