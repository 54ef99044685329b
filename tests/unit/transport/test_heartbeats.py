"""Heartbeats that ask are answered, unless the peer does not read; those that answer are timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from shoal.clock import SystemClock
from shoal.transport.connection import Connection
from shoal.transport.heartbeats import beat, on_heartbeat
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkMeter
from shoal.wire.frame import encode_frame
from shoal.wire.messages.control import Heartbeat


@dataclass(eq=False)
class FakeConnection:
    queued_bytes: int = 0
    meter: LinkMeter = field(default_factory=lambda: LinkMeter(SystemClock()))
    sent: list[Any] = field(default_factory=list)
    peer: str = "peer"
    is_waited_for: bool = True
    heard: bool = True
    spoke: bool = False
    reading: bool = True

    def send(self, buffers: Any) -> None:
        self.sent.append(buffers)


def heard(connection: FakeConnection, heartbeat: Heartbeat) -> list[Any]:
    on_heartbeat(cast("Connection", connection), heartbeat, 1000)
    return connection.sent


def test_a_heartbeat_that_asks_is_answered_with_its_number() -> None:
    assert heard(FakeConnection(), Heartbeat(ping=7)) == [encode_frame(Heartbeat(pong=7))]


@pytest.mark.parametrize("heartbeat", [Heartbeat(), Heartbeat(pong=7)])
def test_any_other_heartbeat_is_not_answered(heartbeat: Heartbeat) -> None:
    assert heard(FakeConnection(), heartbeat) == []


def test_a_peer_that_asks_and_does_not_read_gets_no_more_answers() -> None:
    assert len(heard(FakeConnection(queued_bytes=1000), Heartbeat(ping=1))) == 1
    assert heard(FakeConnection(queued_bytes=1001), Heartbeat(ping=1)) == []


def test_an_answer_is_timed() -> None:
    connection = FakeConnection()
    heard(connection, Heartbeat(pong=connection.meter.ping()))
    assert connection.meter.estimate.round_trip_s is not None


class StallingClock(SystemClock):
    """Of its first sleeps one takes longer than it should, as where the process is frozen; then it ends them."""

    def __init__(self, *late_s: float) -> None:
        self._now_s, self._late_s = 0.0, list(late_s)

    def now_s(self) -> float:
        return self._now_s

    async def sleep_s(self, duration_s: float) -> None:
        if not self._late_s:
            raise TimeoutError
        self._now_s += duration_s + self._late_s.pop(0)


async def test_a_pause_of_a_second_in_which_the_process_has_not_run_is_told_and_what_a_busy_machine_takes_is_not() -> (
    None
):
    stalls: list[float] = []
    with pytest.raises(TimeoutError):
        await beat(lambda: [], lambda *_: None, TransportLimits(), StallingClock(0.0, 0.4, 5.0, 0.1), stalls.append)
    assert stalls == [pytest.approx(5.0)]


@pytest.mark.parametrize(("is_waited_for", "num_pings", "num_sent"), [(True, 1, 8), (False, 0, 4)])
async def test_who_nobody_waits_for_hears_half_as_much_and_is_not_measured(
    is_waited_for: bool, num_pings: int, num_sent: int
) -> None:
    clock = StallingClock(*[0.0] * 8)
    connection = FakeConnection(meter=LinkMeter(clock), is_waited_for=is_waited_for)
    with pytest.raises(TimeoutError):
        await beat(lambda: [cast("Connection", connection)], lambda *_: None, TransportLimits(), clock)
    pings = [frame for frame in connection.sent if frame != encode_frame(Heartbeat())]
    assert (len(pings), len(connection.sent)) == (num_pings, num_sent)
