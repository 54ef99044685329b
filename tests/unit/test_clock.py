"""Deadlines and pauses against a clock of the test's own."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.set_clock import ManualClock

from shoal.clock import TICK_S, Backoff, Deadline, SystemClock, until_tick_s, utc_iso, utc_stamp, wait_for_tick


def test_a_deadline_counts_down_and_then_stays_expired() -> None:
    clock = ManualClock()
    deadline = Deadline.after(clock, 2.0)
    clock.now += 1.5
    assert deadline.remaining_s() == pytest.approx(0.5)
    assert not deadline.expired()
    clock.now += 1.5
    assert deadline.remaining_s() == 0.0
    assert deadline.expired()


def test_pauses_grow_to_the_most_and_start_again_after_a_success() -> None:
    backoff = Backoff(first_s=1.0, max_s=5.0, jitter=0.0)
    assert [backoff.next_delay_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_delay_s() == 1.0


def test_jitter_only_shortens_a_pause_and_only_by_its_share() -> None:
    backoff = Backoff(first_s=1.0, max_s=1.0, jitter=0.25, rng=random.Random(0))
    delays_s = [backoff.next_delay_s() for _ in range(200)]
    assert min(delays_s) >= 0.75
    assert max(delays_s) <= 1.0
    assert len(set(delays_s)) > 100


@pytest.mark.parametrize(
    ("now_s", "duration_s", "left_s"),
    [
        (7.0, 2.0, 2.0),
        (7.03, 2.0, 1.97),
        (6.995, 2.0, 2.005),  # a timer has ended early
        (7.2, 1.0, 0.8),
        (7.2, 0.2, 0.2),  # no tick comes by then
        (7.46, 0.5, 0.04),  # it was late for the tick before
        (7.495, 0.2, 0.2),  # it is at a tick
        (7.5, 0.0, 0.0),
    ],
)
def test_what_is_in_no_hurry_waits_for_the_last_tick_before_its_time(
    now_s: float, duration_s: float, left_s: float
) -> None:
    assert until_tick_s(ManualClock(now_s), duration_s) == pytest.approx(left_s)


@given(st.floats(0.0, 1e7), st.floats(0.0, 1e4))
def test_nobody_waits_for_a_tick_longer_than_for_the_time_itself(now_s: float, duration_s: float) -> None:
    left_s = until_tick_s(ManualClock(now_s), duration_s)
    assert max(0.0, duration_s - TICK_S) <= left_s + 1e-6
    assert left_s <= duration_s + 0.0101


@pytest.mark.parametrize("late_s", [0.0, 0.03, -0.002])
async def test_who_waits_again_and_again_wakes_at_ticks_and_at_none_twice(late_s: float) -> None:
    class Clock(ManualClock):
        async def sleep_s(self, duration_s: float) -> None:
            await super().sleep_s(duration_s + late_s)

    clock, ticks = Clock(100.2), list[float]()
    for _ in range(4):
        assert await wait_for_tick(clock, 0.5) == pytest.approx(late_s)
        ticks.append(clock.now - late_s)
    assert ticks == pytest.approx([100.5, 101.0, 101.5, 102.0])


async def test_who_has_missed_ticks_waits_for_the_next_one_and_for_none_of_them() -> None:
    clock = ManualClock(100.0)
    await wait_for_tick(clock, 1.0)
    clock.now += 3600.3
    await wait_for_tick(clock, 1.0)
    assert clock.now == pytest.approx(3702.0)


async def test_waiting_sleeps_on_the_given_clock() -> None:
    clock = ManualClock()
    await Backoff(first_s=3.0, max_s=9.0, jitter=0.0).wait(clock)
    assert clock.slept_s == [3.0]


async def test_the_system_clock_moves_on_while_a_task_sleeps() -> None:
    clock = SystemClock()
    before_s = clock.now_s()
    await clock.sleep_s(0.01)
    await clock.sleep_s(-1.0)
    assert 0.009 < clock.now_s() - before_s < 5.0


def test_a_wall_clock_that_is_set_moves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, set_to = SystemClock(), time.time() + 3600
    before_s = clock.unix_s()
    monkeypatch.setattr(time, "time", lambda: set_to)
    assert before_s <= clock.unix_s() < before_s + 600
    monkeypatch.undo()
    assert abs(clock.unix_s() - time.time()) < 600


def test_wall_clock_texts_are_utc() -> None:
    assert utc_stamp(0.0) == "19700101-000000"
    assert utc_iso(1.5) == "1970-01-01T00:00:01.500+00:00"


def test_a_count_that_others_and_the_wall_clock_are_ahead_of_catches_up_and_never_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, right_unix_s = SystemClock(), time.time
    monkeypatch.setattr(SystemClock, "began_unix_s", SystemClock.began_unix_s)
    wall_unix_s = [0.0]
    monkeypatch.setattr(time, "time", lambda: right_unix_s() + wall_unix_s[0])
    assert SystemClock.catch_up(3600.0) == 0.0, "the wall clock says nothing of it"
    wall_unix_s[0] = 3600.0
    for ahead_s in (0.0, 3500.0, -3600.0):
        assert SystemClock.catch_up(ahead_s) == 0.0, "nobody else says so"
    before_unix_s = clock.unix_s()
    assert SystemClock.catch_up(3595.0) == pytest.approx(3600.0, abs=30.0)
    assert clock.unix_s() == pytest.approx(before_unix_s + 3600.0, abs=30.0)
    assert SystemClock.catch_up(3595.0) == 0.0, "once is enough"
    wall_unix_s[0] = 0.0
    assert SystemClock.catch_up(-3600.0) == 0.0
