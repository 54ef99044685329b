"""What is left of the work of a swarm under faults."""

from __future__ import annotations

from shoal.ids import StepKey
from shoal_lab.chaos.session import kept_samples
from shoal_lab.observed import Step


def test_a_step_that_one_of_two_stages_has_lost_is_kept_by_half() -> None:
    steps = [Step(float(number), 0, 1, number, ("a", "b"), samples=8) for number in range(4)]
    assert kept_samples(steps, {0: (), 1: ()}) == 32
    assert kept_samples(steps, {0: (), 1: {StepKey(0, 1, 2, 0)}}) == 28
    assert kept_samples(steps, {0: {StepKey(0, 1, 2, 0)}, 1: {StepKey(0, 1, 2, 0), StepKey(0, 1, 3, 0)}}) == 20


def test_another_attempt_at_a_step_that_was_lost_is_not_that_step() -> None:
    step = Step(1.0, 0, 1, 5, ("a", "b"), samples=8, attempt=1)
    assert kept_samples([step], {0: {StepKey(0, 1, 5, 0)}}) == 8
