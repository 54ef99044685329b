"""What a client remembers for who looks at its run."""

from __future__ import annotations

import math

import pytest
from tests.set_clock import ManualClock

from shoal.client.course import Course, LossCurve
from shoal.events.incidents import Cause, IncidentOpened
from shoal.events.run import RoundBegun, RoundRecorded, StepReported, TrainingDiverging
from shoal.wire.messages.control import MAX_CURVE, MAX_TOLD_EVENTS

LOST = TrainingDiverging("20 steps in a row were skipped")


def recorded(round: int, duration_s: float | None) -> RoundRecorded:
    return RoundRecorded(round, 2.5, {}, True, {}, duration_s)


def begun(round: int) -> RoundBegun:
    return RoundBegun(round, 4, 2, 2, 4)


def test_a_curve_of_any_number_of_steps_is_bounded_and_goes_from_the_first_to_the_last() -> None:
    curve = LossCurve()
    for number in range(10_000):
        curve.add(float(number))
        assert len(curve.values) <= MAX_CURVE
    assert curve.values[0] < 300
    assert curve.values[-1] > 9_700
    assert list(curve.values) == sorted(curve.values)


def test_a_loss_that_is_not_finite_and_one_of_a_skipped_step_are_no_part_of_the_curve() -> None:
    course = Course(ManualClock())
    for loss, skipped in ((2.0, False), (math.inf, False), (7.0, True), (1.0, False)):
        course.take(StepReported(0, 1, 0, 4, 4, loss, skipped, 0.5, 7.0), "")
    assert course.losses.values == (2.0, 1.0)


def test_who_asks_again_is_told_what_came_since_and_nothing_twice() -> None:
    course = Course(ManualClock())
    course.take(LOST, LOST.say())
    (first,) = course.events(0)
    assert (first.event, first.level, first.says, first.routine) == ("training.diverging", "WARNING", LOST.say(), False)
    course.take(begun(1), "")  # it says nothing to people
    course.take(recorded(1, 4.0), "")
    (second,) = course.events(first.number)
    assert (second.says, second.routine) == ("round 1 is over after 4.0 s: loss 2.500", True)
    assert not course.events(second.number)


def test_events_of_one_moment_and_of_the_next_start_of_the_client_have_greater_numbers() -> None:
    clock = ManualClock()
    course = Course(clock)
    for _ in range(3):
        course.take(LOST, LOST.say())
    numbers = [event.number for event in course.events(0)]
    assert numbers == sorted(set(numbers))
    clock.now += 1.0
    again = Course(clock)
    again.take(LOST, LOST.say())
    assert again.events(numbers[-1])


def test_what_is_routine_drives_nothing_else_out() -> None:
    course = Course(ManualClock())
    course.take(LOST, LOST.say())
    for round in range(200):
        course.take(recorded(round, 4.0), "")
    told = course.events(0)
    assert (told[0].event, told[-1].says[:9]) == ("training.diverging", "round 199")
    for _ in range(200):
        course.take(LOST, LOST.say())
    assert len(course.events(0)) == MAX_TOLD_EVENTS


def test_what_is_left_is_as_many_typical_rounds_less_what_has_passed_of_this_one() -> None:
    clock = ManualClock()
    course = Course(clock)
    course.take(begun(1), "")
    assert course.left_s(1, 9) is None
    for round, duration_s in ((1, 10.0), (2, 3600.0), (3, 10.0)):  # the second one was paused
        course.take(recorded(round, duration_s), "")
    course.take(begun(4), "")
    assert course.left_s(4, 9) == 60.0
    clock.now += 4.0
    assert course.left_s(4, 9) == 56.0
    clock.now += 400.0
    assert course.left_s(4, 9) == 50.0
    course.take(recorded(9, 10.0), "")
    assert course.left_s(9, 9) == 0.0


def test_a_client_that_was_started_again_knows_nothing_before_the_record_of_a_round() -> None:
    course = Course(ManualClock())
    assert course.left_s(5, 9) is None
    course.take(recorded(5, None), "")
    assert course.left_s(5, 9) is None
    course.take(begun(6), "")
    course.take(recorded(6, 10.0), "")
    assert course.left_s(6, 9) == pytest.approx(30.0)


@pytest.mark.parametrize("shown", [True, False])
def test_an_incident_is_told_also_where_the_clients_screen_has_it_from_somebody_else(shown: bool) -> None:
    course = Course(ManualClock())
    event = IncidentOpened(
        1, "trainer", Cause.ENDED, "trainer 0", "box", None, 2, 0.0, 5.0, "trainer 0 has ended", shown
    )
    course.take(event, event.say())
    (told,) = course.events(0)
    assert (told.says, told.routine) == ("trainer 0 has ended", False)
