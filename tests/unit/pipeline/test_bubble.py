"""How much of a step devices have nothing to do, by the very machines and policy of production in emulated time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.pipeline.emulated_swarm import emulate

from shoal.pipeline import schedule
from shoal.swarm.step_operations import OperationKind, Schedule
from shoal_lab.bench.bubble import bubble_of

GPIPE, ONE_F_ONE_B, ZERO_BUBBLE = Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE


def test_the_theory_is_that_of_the_papers() -> None:
    assert bubble_of(GPIPE, 4, 8, 1, 1, 1) == bubble_of(ONE_F_ONE_B, 4, 8, 1, 1, 1) == pytest.approx(3 / 11)
    assert bubble_of(ZERO_BUBBLE, 4, 8, 1, 1, 1) == pytest.approx(3 / 27)
    assert [bubble_of(schedule, 1, 8, 1, 1, 1) for schedule in Schedule] == [0, 0, 0]
    # Without weight gradients there is nothing to fill a bubble with.
    assert bubble_of(ZERO_BUBBLE, 4, 8, 1, 1, 0) == pytest.approx(3 / 11)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (2, 9), (3, 6), (4, 8), (4, 16), (8, 16)])
def test_the_policy_reaches_the_theory(schedule: Schedule, stages: int, microbatches: int) -> None:
    expected = bubble_of(schedule, stages, microbatches, 1, 1, 1)
    assert emulate(schedule, stages, microbatches).bubble == pytest.approx(expected)


@pytest.mark.parametrize("schedule", Schedule)
@pytest.mark.parametrize("times_s", [(1, 2, 1), (2, 1, 1), (1, 1, 3), (1, 2, 3), (3, 1, 0.5)])
def test_it_comes_near_where_the_times_differ_and_never_below(
    schedule: Schedule, times_s: tuple[float, float, float]
) -> None:
    expected = bubble_of(schedule, 4, 12, *times_s)
    assert expected - 1e-9 <= emulate(schedule, 4, 12, times_s).bubble <= expected + 0.1


def test_zero_bubble_is_idle_less_than_half_as_long_as_1f1b_with_commits_and_messages() -> None:
    ways = {
        schedule: emulate(schedule, 4, 8, num_steps=5, message_s=0.01, commit_s=0.05).bubble for schedule in Schedule
    }
    assert ways[ZERO_BUBBLE] < ways[ONE_F_ONE_B] / 2
    assert ways[ONE_F_ONE_B] == pytest.approx(3 / 11, abs=0.02)


def test_zero_bubble_keeps_no_more_microbatches_than_are_in_flight() -> None:
    assert max(emulate(ZERO_BUBBLE, 4, 32).kept) <= 7
    assert emulate(GPIPE, 4, 32).kept == [32] * 4


def test_the_diagrams_are_what_the_policy_does() -> None:
    drawn = [line.split()[2:] for line in (schedule.__doc__ or "").splitlines() if line.lstrip().startswith("stage ")]
    letters = {"FORWARD": "F", "BACKWARD": "B", "LOSS": "L", "WEIGHTS": "W"}
    done: list[list[str]] = []
    for each in Schedule:
        emulated = emulate(each, 3, 4)
        for timeline in emulated.timeline:
            line = [".."] * round(emulated.length_s)
            for operation, begun_s, ended_s in timeline:
                for second in range(round(begun_s), round(ended_s)):
                    line[second] = f"{letters[operation.kind.name]}{operation.microbatch}"
            done.append(line)
    assert drawn == done


def test_the_last_stage_of_zero_bubble_is_busy_from_its_first_input_on() -> None:
    timeline = emulate(ZERO_BUBBLE, 4, 8).timeline[3]
    work = [entry for entry in timeline if entry[0].kind != OperationKind.COMMIT]
    assert all(one[2] == other[1] for one, other in pairwise(work))
    assert work[0][1] == 3.0
