"""What each peer measures, each by itself, and bounded whatever a peer says."""

from __future__ import annotations

import pytest

from shoal.control import peer_numbers
from shoal.control.peer_numbers import PeerNumbers
from shoal.ids import PeerId
from shoal.wire.messages.control import MetricReport

SERVER, TRAINER = PeerId("server"), PeerId("trainer")


def _report(samples: int = 0, busy_us: int = 0, role: str = "server") -> MetricReport:
    counters = {"step.samples{stage=0}": samples, "device.busy_us{kind=forward,stage=0}": busy_us}
    return MetricReport(role, counters, {}, {})


def test_totals_gauges_speeds_and_quantiles_are_known_by_name() -> None:
    numbers = PeerNumbers()
    numbers.take(SERVER, _report(100, 2_000_000), 5.0)
    seconds = {"step.open_seconds{stage=0}": {0: 50, 8: 5}, "step.open_seconds{stage=1}": {0: 40, 8: 5}}
    counters = {
        "step.samples{stage=0}": 100,
        "step.samples{stage=1}": 60,
        "device.busy_us{kind=forward,stage=1}": 1_000_000,
        "device.busy_us{kind=loss,stage=0}": 2_000_000,
    }
    numbers.take(SERVER, MetricReport("server", counters, {"process.memory_bytes": 7.0}, seconds), 7.0)
    values = numbers.values(SERVER)
    assert [values.pop(f"step.open_seconds/{name}") for name in ("p50", "p95")] == [
        pytest.approx(2**0.125),
        pytest.approx(4 * 2**0.125),
    ]
    assert values == {
        "step.samples": 160.0,
        "device.busy_us": 3_000_000.0,
        "process.memory_bytes": 7.0,
        "samples_per_s": 30.0,
        "busy": 0.5,
    }
    assert (numbers.heard_s(SERVER), numbers.heard_s(TRAINER), numbers.values(TRAINER)) == (7.0, None, {})


def test_speeds_are_those_of_the_last_seconds() -> None:
    numbers = PeerNumbers()
    for at_s in range(0, 40, 2):
        numbers.take(SERVER, _report(1 + (0 if at_s <= 20 else 4 * (at_s - 20))), float(at_s))
    assert numbers.values(SERVER)["samples_per_s"] == 4.0


def test_a_process_that_begins_anew_has_no_speed_below_0() -> None:
    numbers = PeerNumbers()
    for at_s, samples in enumerate((10, 12, 1)):
        numbers.take(SERVER, _report(samples), float(at_s))
    assert "samples_per_s" not in numbers.values(SERVER)
    numbers.take(SERVER, _report(3), 3.0)
    assert numbers.values(SERVER)["samples_per_s"] == 2.0


def test_an_answer_that_names_no_role_is_of_the_role_that_is_known() -> None:
    numbers = PeerNumbers()
    numbers.take(SERVER, _report(1), 0.0)
    numbers.take(SERVER, _report(2, role=""), 1.0)
    assert numbers.reports()[SERVER].role == "server"


def test_news_are_the_reports_of_who_was_heard_since() -> None:
    numbers = PeerNumbers()
    numbers.take(SERVER, _report(1), 0.0)
    numbers.take(TRAINER, _report(1), 0.0)
    assert numbers.news().keys() == {SERVER, TRAINER}
    numbers.take(SERVER, _report(2), 1.0)
    assert numbers.news() == {SERVER: _report(2)}
    assert numbers.news() == {}
    assert numbers.reports().keys() == {SERVER, TRAINER}


def test_what_is_not_in_the_catalogue_or_not_of_its_kind_is_left_out() -> None:
    numbers = PeerNumbers()
    counters, gauges = {"made.up": 1, "process.memory_bytes": 1}, {"transport.lost": 1.0, "made.up{a=b}": 1.0}
    histograms = {"made.up": {0: 1}, "transport.lost": {0: 1}}
    numbers.take(SERVER, MetricReport("server", counters, gauges, histograms), 0.0)
    assert numbers.reports()[SERVER] == MetricReport("server", {}, {}, {})
    assert numbers.values(SERVER) == {}


def test_who_has_said_nothing_for_the_longest_time_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_numbers, "MAX_PEERS", 3)
    numbers = PeerNumbers()
    for number, peer in enumerate("abcad"):
        numbers.take(PeerId(peer), _report(1), float(number))
    assert list(numbers.reports()) == ["c", "a", "d"]
    assert numbers.news().keys() == {"c", "a", "d"}
