"""When a round may be ended, and the time of a run, which a pause is no part of."""

from __future__ import annotations

import math

from shoal.swarm.round_boundary import RoundBoundary, RunTime


def over(boundary: RoundBoundary, now_s: float, *, all_done: bool = False, is_stuck: bool = False) -> bool:
    return boundary.is_over(now_s, all_done=all_done, is_stuck=is_stuck)


def test_the_time_of_a_run_stands_still_in_its_pauses() -> None:
    time = RunTime()
    time.pause(10.0)
    time.pause(12.0)
    assert (time.is_paused, time.at_s(15.0), time.pause_s(15.0)) == (True, 10.0, 5.0)
    time.resume(15.0)
    time.resume(16.0)
    assert (time.is_paused, time.at_s(15.0), time.at_s(20.0), time.pause_s(20.0)) == (False, 10.0, 15.0, 0.0)
    time.pause(30.0)
    assert (time.at_s(40.0), time.all_pauses_s(40.0)) == (25.0, 15.0)


def test_a_round_is_over_when_all_are_done_or_their_time_has_passed() -> None:
    boundary = RoundBoundary(RunTime(), 5.0, 100.0)
    assert not over(boundary, 104.0)
    assert over(boundary, 104.0, all_done=True)
    assert boundary.left_s(104.0) == 1.0
    assert over(boundary, 105.0)


def test_a_round_without_a_deadline_takes_as_long_as_its_trainers() -> None:
    boundary = RoundBoundary(RunTime(), math.inf, 100.0)
    assert boundary.left_s(1e9) == math.inf
    assert not over(boundary, 1e9)
    assert over(boundary, 1e9, all_done=True)


def test_in_a_pause_nothing_ends_and_afterwards_as_much_time_is_left_as_there_was() -> None:
    time = RunTime()
    boundary = RoundBoundary(time, 5.0, 100.0)
    time.pause(103.0)
    assert boundary.left_s(103.0) == math.inf
    assert not over(boundary, 700.0)
    assert not over(boundary, 700.0, all_done=True)
    time.resume(703.0)
    assert boundary.left_s(703.0) == 2.0
    assert not over(boundary, 704.9)
    assert over(boundary, 705.0)


def test_a_round_that_begins_in_a_pause_has_all_of_its_time() -> None:
    time = RunTime()
    time.pause(90.0)
    boundary = RoundBoundary(time, 5.0, 100.0)
    time.resume(700.0)
    assert boundary.left_s(700.0) == 5.0


def test_while_a_stage_is_missing_the_deadline_ends_nothing_and_begins_anew_when_all_are_served() -> None:
    boundary = RoundBoundary(RunTime(), 5.0, 100.0)
    assert not over(boundary, 105.0, is_stuck=True)
    assert boundary.left_s(110.0) == math.inf
    assert not over(boundary, 120.0)
    assert boundary.left_s(120.0) == 5.0
    assert over(boundary, 125.0)


def test_a_stage_that_is_served_again_before_the_deadline_changes_nothing() -> None:
    boundary = RoundBoundary(RunTime(), 5.0, 100.0)
    assert not over(boundary, 101.0, is_stuck=True)
    assert not over(boundary, 104.0)
    assert over(boundary, 105.0)
