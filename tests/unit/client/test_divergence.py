"""When skipped steps are said to be many, and when they end the run."""

from __future__ import annotations

import pytest

from shoal.client.divergence import MANY_IN_A_ROW, MAX_SKIPPED_ROUNDS, Divergence
from shoal.config.diloco import DilocoConfig, InnerOptimConfig
from shoal.errors import TrainingDiverged


def diloco(outer_steps: int = 100) -> DilocoConfig:
    return DilocoConfig(outer_steps=outer_steps, inner_optim=InnerOptimConfig(adam_lr=1e30))


def test_many_skipped_steps_in_a_row_are_said_once_with_what_to_change() -> None:
    divergence = Divergence(diloco())
    assert divergence.step(False) is None
    told = [divergence.step(True) for _ in range(3 * MANY_IN_A_ROW)]
    assert [number for number, text in enumerate(told, 1) if text] == [MANY_IN_A_ROW]
    said = str(told[MANY_IN_A_ROW - 1])
    assert said.startswith("10 steps in a row were skipped, because loss or gradient was not finite; lower ")
    assert "diloco.inner_optim.adam_lr (now 1e+30)" in said


def test_a_step_that_counts_starts_the_row_again() -> None:
    divergence = Divergence(diloco())
    assert not any(divergence.step(number % MANY_IN_A_ROW != 0) for number in range(5 * MANY_IN_A_ROW))


def test_rounds_of_nothing_but_skipped_steps_end_the_run() -> None:
    divergence = Divergence(diloco())
    for _ in range(MAX_SKIPPED_ROUNDS - 1):
        divergence.round_over(0, 8)
    divergence.round_over(4, 4)
    divergence.round_over(0, 8)
    divergence.round_over(0, 0)  # nothing happened in it at all, which is judged elsewhere
    divergence.round_over(0, 8)
    with pytest.raises(TrainingDiverged, match=r"in 3 rounds .* lower diloco\.inner_optim\.adam_lr .* start again"):
        divergence.round_over(0, 8)


def test_a_short_run_of_nothing_but_skipped_steps_fails_too() -> None:
    with pytest.raises(TrainingDiverged):
        Divergence(diloco(outer_steps=1)).round_over(0, 8)


def test_where_no_step_was_finite_yet_the_samples_and_the_loss_are_named_before_the_rates() -> None:
    divergence = Divergence(diloco(outer_steps=1))
    told = [divergence.step(True) for _ in range(MANY_IN_A_ROW)]
    first = "no step has given a number yet: look at the samples and at the model's loss first, else lower diloco"
    assert first in str(told[-1])
    with pytest.raises(TrainingDiverged, match=first):
        divergence.round_over(0, 8)
