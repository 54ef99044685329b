"""What a process measures, as it is reported."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from tests.set_clock import FewSleeps

from shoal.control.counter_report import counters_reported
from shoal.ids import PeerId
from shoal.swarm.view import PeerLabel
from shoal.telemetry.registry import FIRST_BUCKET, LAST_BUCKET
from shoal.transport.base import Received
from shoal.transport.dispatch import measured
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.control import (
    MAX_COUNTERS,
    MAX_GAUGES,
    MAX_HISTOGRAMS,
    MAX_VALUES,
    MetricReport,
    Metrics,
    PeerMetrics,
)

_BUCKETS = dict.fromkeys(range(FIRST_BUCKET, LAST_BUCKET + 1), 1 << 53)


def _names(number: int) -> list[str]:
    return [f"{'n' * 48}{{{index:0>96}}}" for index in range(number)]


LARGEST = MetricReport(
    "r" * 16,
    dict.fromkeys(_names(MAX_COUNTERS), 1 << 53),
    dict.fromkeys(_names(MAX_GAUGES), 2.0**53),
    dict.fromkeys(_names(MAX_HISTOGRAMS), _BUCKETS),
    1 << 31,
)


def _received(message: Message) -> Message:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message)


def test_the_largest_report_has_at_most_64_kib() -> None:
    assert _received(LARGEST) == LARGEST
    assert len(msgspec.msgpack.encode(LARGEST)) <= 64 * 1024


@pytest.mark.parametrize(
    "wrong",
    [
        {"counters": dict.fromkeys(_names(MAX_COUNTERS + 1), 1)},
        {"counters": {"a": -1}},
        {"counters": {"a": 1 << 54}},
        {"counters": {f"{'n' * 49}": 1}},
        {"counters": {f"a{{{'v' * 97}}}": 1}},
        {"counters": {"a{b=\x1b[31m}": 1}},
        {"gauges": dict.fromkeys(_names(MAX_GAUGES + 1), 1.0)},
        {"gauges": {"a\u202e": 1.0}},
        {"gauges": {"a": float("nan")}},
        {"gauges": {"a": float("inf")}},
        {"gauges": {"a": 1e300}},
        {"histograms": dict.fromkeys(_names(MAX_HISTOGRAMS + 1), _BUCKETS)},
        {"histograms": {"a": {LAST_BUCKET + 1: 1}}},
        {"histograms": {"a": {FIRST_BUCKET - 1: 1}}},
        {"role": "Two words"},
        {"role": "r" * 17},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_a_report_of_too_much_or_of_what_cannot_be_is_refused_where_it_is_decoded(wrong: dict[str, Any]) -> None:
    report = msgspec.structs.replace(LARGEST, **wrong)
    for message in (report, PeerMetrics(PeerId("a"), report)):
        with pytest.raises(msgspec.ValidationError):
            _received(message)


def test_numbers_of_the_run_and_the_peer_that_is_spoken_of_are_bounded_as_well() -> None:
    def numbers(*names: str) -> Metrics:
        return Metrics("client", PeerId("a"), 1, dict.fromkeys(names, 1.0))

    longest = numbers("x" * 160, *(f"counters/a{{b={number}}}" for number in range(MAX_VALUES - 1)))
    assert _received(longest) == longest
    report = MetricReport("", {}, {}, {})
    assert _received(PeerMetrics(PeerId("p" * 128), report))
    for wrong in (
        numbers("x" * 161),
        numbers("two words"),
        msgspec.structs.replace(numbers("loss"), steps=0),
        numbers(*(f"n{number}" for number in range(MAX_VALUES + 1))),
        PeerMetrics(PeerId("p" * 129), report),
    ):
        with pytest.raises(msgspec.ValidationError):
            _received(wrong)


def test_a_process_says_what_it_has_measured_and_no_more_than_fits_into_a_report() -> None:
    network = MemoryNetwork(encode=True)
    server, other = (network.endpoint(PeerId(name)) for name in ("server", "other"))
    for number in range(MAX_COUNTERS + 1):
        server.metrics.counter("transport.lost", cause=number).add()
    server.metrics.histogram("step.open_seconds", stage=1).observe(1.0)
    server.introduce(other.hop)
    server.post(other.peer_id, MetricReport("", {}, {}, {}))
    report = measured(server, PeerLabel("server", "box2", 1), 3)
    assert (report.role, report.host, report.index) == ("server", "box2", 1)
    assert (report.number, len(report.counters)) == (3, MAX_COUNTERS)
    assert report.histograms == {"step.open_seconds{stage=1}": {0: 1}}
    assert report.gauges["process.memory_bytes"] >= 2**20
    sent = {f"transport.sent_bytes{{traffic={traffic}}}": count for traffic, count in server.sent_bytes.items()}
    assert {name: count for name, count in report.gauges.items() if name.startswith("transport.sent")} == sent
    assert sum(sent.values()) > 0
    assert measured(other, None).gauges["transport.received_bytes"] == sum(sent.values())


@pytest.mark.anyio
async def test_a_role_says_everything_again_and_again_so_that_silence_shows() -> None:
    network = MemoryNetwork()
    server, client = (network.endpoint(PeerId(name)) for name in ("server", "client"))
    server.metrics.counter("transport.lost").add()
    clock = FewSleeps(3)
    with anyio.fail_after(240):
        async with counters_reported(server, PeerLabel("server", "box2", 1), lambda: client.hop, clock):
            await clock.over.wait()
        heard: list[MetricReport] = []
        async for event in client.events():
            if isinstance(event, Received) and isinstance(event.message, MetricReport):
                heard.append(event.message)
            if len(heard) == 4:
                break
    assert [report.counters["transport.lost"] for report in heard] == [1] * 4
    lags = [sum(report.histograms["process.loop_lag_seconds"].values()) for report in heard]
    assert lags == [1, 2, 3, 3], "at each look, how much too late it was"
    assert clock.slept_s == pytest.approx([1.7, 2.0, 2.0]), "it looks at ticks"


@pytest.mark.anyio
async def test_a_client_that_is_announced_no_more_is_tried_again_now_and_then() -> None:
    network = MemoryNetwork()
    server, client = (network.endpoint(PeerId(name)) for name in ("server", "client"))
    announced, clock = [client.hop], FewSleeps(7)
    with anyio.fail_after(240):
        async with counters_reported(
            server, PeerLabel("server", "box2", 1), lambda: announced.pop() if announced else None, clock
        ):
            await clock.over.wait()
        heard: list[float] = []
        async for event in client.events():
            if isinstance(event, Received) and isinstance(event.message, MetricReport):
                heard.append(sum(event.message.histograms["process.loop_lag_seconds"].values()))
            if len(heard) == 3:
                break
    assert heard == [1, 4, 7], "each third time"
