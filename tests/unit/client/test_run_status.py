"""What a client answers to whoever asks how the run is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.set_clock import ManualClock

from shoal.client.course import Course
from shoal.client.progress import Progress
from shoal.client.run_status import StatusAnswers
from shoal.control.peer_numbers import PeerNumbers
from shoal.events.run import StepReported
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.control import AskCounters, AskStatus, MetricReport, RunStatus, ServerNumbers, ToldEvent


class Asked:
    """A client's parts, as far as they are asked."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.progress = Progress()
        self.course = Course(self.clock)
        self.numbers = PeerNumbers()
        self.replicas = [SimpleNamespace(peer=PeerId("a")), SimpleNamespace(peer=PeerId("b"))]
        self.candidates = [SimpleNamespace(peer=PeerId("idle"))]
        self.missing: tuple[int, ...] = ()
        self.unserved: tuple[int, ...] = ()
        self.present: dict[int, Any] = {}
        self.by = ""
        self.posted: list[tuple[PeerId, RunStatus]] = []
        self.answers = StatusAnswers(
            self,  # type: ignore[arg-type]
            SimpleNamespace(diloco=SimpleNamespace(outer_steps=9), num_stages=2),  # type: ignore[arg-type]
            SimpleNamespace(view=self),  # type: ignore[arg-type]
            SimpleNamespace(progress=self.progress),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.numbers,
            self.course,
            self.clock,
        )

    def post(self, peer: PeerId, message: RunStatus) -> None:
        self.posted.append((peer, message))

    @property
    def is_paused(self) -> bool:
        return bool(self.by)

    def missing_stages(self, num_stages: int) -> tuple[int, ...]:
        return self.unserved

    def step(self, number: int) -> None:
        now_s = self.clock.now_s()
        self.progress.step(StepReported(0, number, 0, 4, 4, 2.5 - number, False, 1.0, now_s))


def test_whoever_asks_is_answered_and_other_questions_are_left_to_others() -> None:
    asked = Asked()
    assert asked.answers.receive(Received(PeerId("observer"), AskStatus()))
    assert not asked.answers.receive(Received(PeerId("observer"), AskCounters(1)))
    assert asked.posted == [(PeerId("observer"), asked.answers.status())]


@pytest.mark.parametrize(
    ("round", "missing", "unserved", "present", "state"),
    [
        (0, (), (0, 1), (), "waiting for servers: no server for stages 0, 1"),
        (0, (), (), (), "starting: the first round has not begun"),
        (3, (), (), (), "starting trainers for round 3"),
        (3, (), (), (0,), "training round 3 of 9"),
        (3, (1,), (), (0,), "stopped in round 3: no server for stage 1"),
        (3, (), (1,), (0,), "stopped in round 3: no server for stage 1"),
    ],
)
def test_the_state_is_said_in_words(round: int, missing: Any, unserved: Any, present: Any, state: str) -> None:
    asked = Asked()
    asked.progress.round, asked.missing, asked.unserved = round, missing, unserved
    asked.present = dict.fromkeys(present)
    assert asked.answers.status().state == state
    assert asked.answers.status().trainers == tuple(present)


@pytest.mark.parametrize(
    ("round", "missing", "state"),
    [
        (0, (), "paused by me@here before the first round"),
        (3, (), "paused by me@here in round 3"),
        (3, (1,), "paused by me@here in round 3; no server for stage 1"),
    ],
)
def test_a_pause_is_said_with_whoever_wants_it(round: int, missing: Any, state: str) -> None:
    asked = Asked()
    assert not asked.answers.status().paused
    asked.progress.round, asked.missing, asked.present, asked.by = round, missing, {0: None}, "me@here"
    assert (asked.answers.status().paused, asked.answers.status().state) == (True, state)


def test_the_rate_of_a_time_that_is_over_is_not_told_as_if_it_were_now() -> None:
    asked = Asked()
    assert (asked.answers.status().loss, asked.answers.status().last_step_s) == (None, None)
    for number in range(3):
        asked.step(number)
        asked.clock.now += 1.0
    status = asked.answers.status()
    assert (status.steps, status.samples, status.loss, status.samples_per_s) == (3, 12, 0.5, 4.0)
    assert status.last_step_s == 1.0
    asked.clock.now += 60.0
    assert (asked.answers.status().samples_per_s, asked.answers.status().last_step_s) == (0.0, 61.0)


def test_what_no_server_can_have_measured_is_told_as_what_one_may_have_and_refused_where_it_is_told() -> None:
    asked = Asked()
    gauges = {"process.memory_bytes": -5e8, **{f"transport.sent_bytes{{traffic={each}}}": 2.0**53 for each in range(3)}}
    asked.numbers.take(PeerId("a"), MetricReport("server", {}, gauges, {}), asked.clock.now_s())
    status = asked.answers.status()
    assert (status.servers[0].memory_bytes, status.servers[0].sent_bytes) == (0, 1 << 53)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=RunStatus) == status
    event = ToldEvent(1 << 62, "INFO", "x", "x")
    for odd in ({"left_s": math.inf}, {"samples_per_s": -1.0}, {"last_step_s": math.nan}, {"events": (event,)}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.structs.replace(status, **odd)), type=RunStatus)


def test_each_server_is_told_with_its_own_numbers_and_their_age_and_what_is_old_has_no_speed() -> None:
    asked = Asked()
    gauges = {"process.memory_bytes": 5e8, "transport.sent_bytes": 7e6, "transport.received_bytes": 8e6}
    for samples, busy_us in ((100, 10_000_000), (160, 11_500_000)):
        counters = {"step.committed{stage=0}": 40, "step.samples{stage=0}": samples, "device.busy_us{stage=0}": busy_us}
        report = MetricReport("server", counters, gauges, {"step.open_seconds{stage=0}": {0: 40}})
        asked.numbers.take(PeerId("a"), report, asked.clock.now_s())
        asked.clock.now += 2.0
    asked.numbers.take(PeerId("idle"), MetricReport("server", {}, {}, {}), asked.clock.now_s())
    asked.numbers.take(PeerId("trainer"), report, asked.clock.now_s())
    step_s = pytest.approx(2**0.125)
    of_start = {"steps": 40, "sent_bytes": 7_000_000, "received_bytes": 8_000_000, "memory_bytes": 500_000_000}
    assert asked.answers.status().servers == (
        ServerNumbers(PeerId("a"), 2.0, samples_per_s=30.0, busy=0.75, step_s=step_s, **of_start),
        ServerNumbers(PeerId("idle"), 0.0),
    )
    asked.clock.now += 4.0
    assert asked.answers.status().servers[0] == ServerNumbers(PeerId("a"), 6.0, step_s=step_s, **of_start)
