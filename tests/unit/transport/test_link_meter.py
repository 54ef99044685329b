"""Round trips and receive rates from what happened when: by a clock of the test, and over the model of a link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from tests.set_clock import SetClock

from shoal.ids import PeerId
from shoal.transport.connection import Connection, ConnectionOwner
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import (
    MIN_MEASURED_BYTES,
    NUM_ROUND_TRIPS,
    PING_INTERVAL_S,
    PING_PATIENCE_S,
    LinkEstimate,
    LinkMeter,
)
from shoal.wire.tensors import empty_bytes
from shoal_lab.faults.link import LinkConditions
from shoal_lab.faults.link_model import LinkModel

MBIT = 1e6 / 8
MIB = 1 << 20


@pytest.fixture
def clock() -> SetClock:
    return SetClock(100.0)


@pytest.fixture
def meter(clock: SetClock) -> LinkMeter:
    return LinkMeter(clock)


def answer(meter: LinkMeter, clock: SetClock, after_s: float) -> None:
    number = meter.ping()
    assert number
    clock.now += after_s
    meter.pong(number)


def test_nothing_is_known_before_anything_was_measured(meter: LinkMeter) -> None:
    assert meter.estimate == LinkEstimate(None, None)


def test_the_round_trip_is_the_least_of_the_last_answers(meter: LinkMeter, clock: SetClock) -> None:
    for after_s in (0.5, 0.2, 0.9):
        answer(meter, clock, after_s)
        clock.now += PING_INTERVAL_S
    assert meter.estimate.round_trip_s == pytest.approx(0.2)
    for _ in range(NUM_ROUND_TRIPS):  # the link has become slower, or its queue lasts
        answer(meter, clock, 0.6)
        clock.now += PING_INTERVAL_S
    assert meter.estimate.round_trip_s == pytest.approx(0.6)


def test_a_ping_is_due_when_the_one_before_is_answered_and_some_time_ago(meter: LinkMeter, clock: SetClock) -> None:
    answer(meter, clock, 0.1)
    assert meter.ping() == 0
    clock.now += PING_INTERVAL_S
    assert meter.ping()
    clock.now += PING_INTERVAL_S
    assert meter.ping() == 0  # not answered yet
    clock.now += PING_PATIENCE_S
    assert meter.ping()


def test_answers_that_nobody_waits_for_say_nothing(meter: LinkMeter, clock: SetClock) -> None:
    meter.pong(1)
    late = meter.ping()
    clock.now += PING_PATIENCE_S
    current = meter.ping()
    for number in (late, current + 1, 0):
        meter.pong(number)
    assert meter.estimate.round_trip_s is None
    clock.now += 0.1
    for _ in range(2):
        meter.pong(current)
        clock.now += 0.1
    assert meter.estimate.round_trip_s == pytest.approx(0.1)


def test_a_new_connection_is_asked_at_once_and_owes_no_answer_of_the_old_one(meter: LinkMeter, clock: SetClock) -> None:
    answer(meter, clock, 0.3)
    meter.ping()
    old = 2
    meter.received(MIB, unfinished=True)
    meter.connected()
    meter.pong(old)
    clock.now += 1.0
    meter.received(MIB, unfinished=False)
    assert meter.estimate == LinkEstimate(pytest.approx(0.3), None)
    assert meter.ping()


def receive(meter: LinkMeter, clock: SetClock, *, num_reads: int, read_bytes: int, every_s: float) -> None:
    """Receive one frame."""
    for number in range(num_reads):
        clock.now += every_s
        meter.received(read_bytes, unfinished=number < num_reads - 1)


def test_pauses_between_frames_do_not_count(meter: LinkMeter, clock: SetClock) -> None:
    for _ in range(5):
        receive(meter, clock, num_reads=50, read_bytes=25_000, every_s=0.01)
        clock.now += 60.0
    assert meter.estimate.receive_bytes_per_s == pytest.approx(2.5e6)


def test_time_in_which_this_side_does_not_read_does_not_count(meter: LinkMeter, clock: SetClock) -> None:
    receive(meter, clock, num_reads=50, read_bytes=25_000, every_s=0.01)
    meter.received(25_000, unfinished=True)
    meter.paused()
    clock.now += 60.0
    meter.received(4 * MIB, unfinished=True)  # what the socket's buffer held
    for _ in range(20):
        clock.now += 0.01
        meter.received(25_000, unfinished=True)
    assert meter.estimate.receive_bytes_per_s == pytest.approx(2.5e6)


async def test_a_connection_that_stops_reading_tells_its_meter(meter: LinkMeter, clock: SetClock) -> None:
    owner = SimpleNamespace(allocate=empty_bytes)
    connection = Connection(cast("ConnectionOwner", owner), TransportLimits())
    connection.accept(PeerId("peer"), 1, meter)
    receive(meter, clock, num_reads=50, read_bytes=25_000, every_s=0.01)
    meter.received(25_000, unfinished=True)
    connection.read_on(False)
    assert not connection.reading
    clock.now += 60.0
    meter.received(25_000, unfinished=False)
    assert meter.estimate.receive_bytes_per_s == pytest.approx(2.5e6)


def test_small_frames_show_no_rate(meter: LinkMeter, clock: SetClock) -> None:
    for _ in range(1000):
        receive(meter, clock, num_reads=1, read_bytes=2000, every_s=0.01)
    assert meter.estimate.receive_bytes_per_s is None
    receive(meter, clock, num_reads=2, read_bytes=MIN_MEASURED_BYTES - 1, every_s=0.1)
    assert meter.estimate.receive_bytes_per_s is None


def test_a_rate_of_before_is_forgotten_while_receiving_goes_on(meter: LinkMeter, clock: SetClock) -> None:
    receive(meter, clock, num_reads=1000, read_bytes=25_000, every_s=0.01)
    clock.now += 3600.0
    assert meter.estimate.receive_bytes_per_s == pytest.approx(2.5e6)
    receive(meter, clock, num_reads=2000, read_bytes=2_500, every_s=0.01)
    assert meter.estimate.receive_bytes_per_s == pytest.approx(2.5e5, rel=0.3)


@pytest.mark.parametrize(
    "conditions",
    [
        LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075),
        LinkConditions(rate_bytes_per_s=20 * MBIT, delay_s=0.075, jitter_s=0.02, loss=0.005),
        LinkConditions(rate_bytes_per_s=1000 * MBIT, delay_s=0.0001),
    ],
)
def test_the_estimate_is_the_rate_of_the_link_also_of_one_that_stalls_and_bursts(
    meter: LinkMeter, clock: SetClock, conditions: LinkConditions
) -> None:
    model = LinkModel(conditions, 1)
    for frame in range(8):
        parcels = model.take(100.0 + 10 * frame, bytes(4 * MIB))
        for number, parcel in enumerate(parcels, 1):
            clock.now = parcel.arrives_s
            meter.received(len(parcel.data), unfinished=number < len(parcels))
    assert meter.estimate.receive_bytes_per_s == pytest.approx(conditions.rate_bytes_per_s, rel=0.15)
