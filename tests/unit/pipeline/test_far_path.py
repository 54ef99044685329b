"""A path with a line between its stages: a step takes one round trip, where replicas have room for its microbatches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.unit.pipeline.emulated_swarm import Emulated, emulate

from shoal.swarm.step_operations import Schedule

LINE_S = 0.075
"""One way."""
TIMES_S = (0.001, 0.001, 0.001)
NUM_STEPS = 8
SPLIT = (Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)


def trained(
    schedule: Schedule, room: int | None, *, line_s: float = LINE_S, stages: int = 2, microbatches: int = 12
) -> tuple[Emulated, list[float]]:
    """Train; return also how many round trips each step but the first takes."""
    done = emulate(schedule, stages, microbatches, TIMES_S, num_steps=NUM_STEPS, line_s=line_s, room=room)
    return done, [(later - earlier) / (2 * LINE_S) for earlier, later in pairwise(done.ends_s)]


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_step_over_a_line_takes_as_many_round_trips_as_windows_and_one_when_the_window_has_grown(
    schedule: Schedule,
) -> None:
    done, round_trips = trained(schedule, 64)
    assert all(4.0 < each < 4.5 for each in round_trips[:2]), "twelve, three at a time"
    assert all(1.0 < each < 1.5 for each in round_trips[2:]), "three steps have said that the line is long"
    assert done.kept[0] == 12


@pytest.mark.parametrize("schedule", SPLIT)
def test_nobody_keeps_more_than_the_replica_with_the_least_memory_says(schedule: Schedule) -> None:
    done, round_trips = trained(schedule, 6)
    assert all(2.0 < each < 2.5 for each in round_trips[2:])
    assert max(done.kept) == 6


@pytest.mark.parametrize("schedule", SPLIT)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_without_a_line_nothing_is_other_than_where_replicas_have_no_room(schedule: Schedule, stages: int) -> None:
    (usual, _), (roomy, _) = (trained(schedule, room, line_s=0.0, stages=stages) for room in (None, 64))
    assert (usual.timeline, usual.kept) == (roomy.timeline, roomy.kept)
