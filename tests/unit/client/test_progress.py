"""Running totals from the trainers' reports."""

from __future__ import annotations

import math

import msgspec
import pytest

from shoal.client.progress import CURVE_PARTS, RATE_WINDOW_S, Progress
from shoal.events.run import LossPart, RoundBegun, RoundRecorded, ShareEvaluated, StepReported, TrainerFinished


def step(loss: float, num_samples: int = 4, *, skipped: bool = False, at_s: float = 1.0) -> StepReported:
    return StepReported(0, 0, 0, num_samples, num_samples, loss, skipped, 0.5, at_s)


def recorded(**sent_bytes: int) -> RoundRecorded:
    return RoundRecorded(1, None, {}, True, sent_bytes, None)


def test_the_first_and_last_loss_are_those_of_steps_that_were_not_skipped() -> None:
    progress = Progress()
    progress.step(step(math.nan, skipped=True, at_s=1.0))
    assert progress.loss_first is None
    progress.step(step(5.0, at_s=2.0))
    progress.step(step(4.0, at_s=3.0))
    progress.step(step(math.inf, skipped=True, at_s=4.0))
    assert (progress.loss_first, progress.loss_last) == (5.0, 4.0)
    assert (progress.steps, progress.skipped_steps, progress.samples) == (4, 2, 16)


def test_the_loss_of_a_round_is_weighted_by_samples_and_starts_again() -> None:
    progress = Progress()
    progress.step(step(2.0, 1, at_s=1.0))
    progress.step(step(6.0, 3, at_s=1.0))
    progress.step(step(math.nan, 8, skipped=True, at_s=1.0))
    assert progress.round_loss == pytest.approx(5.0)
    progress.recorded(recorded())
    assert progress.round_loss is None


def test_the_curve_of_a_round_has_the_range_and_mean_of_its_steps_in_a_bounded_number_of_parts() -> None:
    progress = Progress()
    progress.step(step(math.nan, 8, skipped=True))
    progress.step(step(5.0, 1))
    assert progress.round_curve == (LossPart(1, 5.0, 5.0, 5.0),)
    for number in range(2 * CURVE_PARTS):
        progress.step(step(2.0 + number % 3, 1 + number % 3))
    curve = progress.round_curve
    assert len(curve) == 22, "of three steps each"
    assert curve[0] == LossPart(4, 2.0, 3.25, 5.0)
    assert curve[1] == LossPart(6, 2.0, float(f"{(4.0 * 3 + 2.0 + 3.0 * 2) / 6:.5g}"), 4.0)
    assert sum(part.samples for part in curve) == progress.samples - 8
    progress.recorded(recorded())
    assert progress.round_curve == ()


def test_the_evaluation_is_complete_when_all_shares_are_there() -> None:
    progress = Progress()
    assert progress.evaluated(ShareEvaluated(1, 0, 0.3, 3, 3), 10) is None
    assert not progress.eval_losses
    assert progress.evaluated(ShareEvaluated(0, 0, 0.1, 7, 7), 10) == (0.1 + 0.3) / 10
    assert progress.evaluated(ShareEvaluated(0, 1, 20.0, 10, 10), 10) == 2.0
    assert progress.eval_losses == {0: (0.1 + 0.3) / 10, 1: 2.0}


def test_a_share_that_is_reported_twice_counts_once() -> None:
    progress = Progress()
    progress.evaluated(ShareEvaluated(0, 2, 10.0, 5, 5), 10)
    assert progress.evaluated(ShareEvaluated(0, 2, 10.0, 5, 5), 10) is None
    assert progress.evaluated(ShareEvaluated(1, 2, 30.0, 5, 5), 10) == 4.0


def test_shares_of_an_attempt_that_was_cut_differently_do_not_count() -> None:
    progress = Progress()
    progress.evaluated(ShareEvaluated(1, 2, 99.0, 5, 5), 10)
    progress.begin_round(RoundBegun(3, 4, 1, 1, 2))
    assert progress.evaluated(ShareEvaluated(0, 2, 40.0, 10, 10), 10) == 4.0


def test_the_sum_of_the_shares_does_not_depend_on_who_reports_first() -> None:
    shares = [ShareEvaluated(slot, 0, loss_sum, 1, 1) for slot, loss_sum in enumerate((1e16, 1.0, -1e16))]
    losses = set()
    for order in (shares, shares[::-1], [shares[1], shares[0], shares[2]]):
        progress = Progress()
        losses.add([progress.evaluated(share, 3) for share in order][-1])
    assert len(losses) == 1


def test_the_recent_rate_forgets_what_is_long_past() -> None:
    progress = Progress()
    assert progress.recent_samples_per_s() == 0.0
    progress.step(step(1.0, 1000, at_s=0.0))
    assert progress.recent_samples_per_s() == 0.0
    for second in (20.0, 21.0, 22.0):
        progress.step(step(1.0, 10, at_s=second))
    assert RATE_WINDOW_S < 20
    assert progress.recent_samples_per_s() == pytest.approx(10.0)
    assert progress.recent_targets_per_s() == pytest.approx(sum(step(1.0, 10).num_targets for _ in range(2)) / 2)


def test_the_mean_rate_is_over_the_time_from_the_first_step_to_the_last() -> None:
    progress = Progress()
    progress.step(step(1.0, at_s=100.0))
    assert progress.mean_samples_per_s() == 0.0
    progress.step(step(1.0, at_s=102.0))
    progress.step(step(1.0, at_s=104.0))
    # Two intervals of two seconds, four samples each.
    assert progress.mean_samples_per_s() == pytest.approx(2.0)


def test_bytes_are_added_by_traffic() -> None:
    progress = Progress()
    progress.done(TrainerFinished(0, 1, 1, {"activations": 5, "control": 1}))
    progress.recorded(recorded(control=2))
    progress.recorded(recorded(control=4))
    assert progress.sent_bytes == {"activations": 5, "control": 7}


def test_what_a_trainer_has_sent_counts_from_its_start() -> None:
    progress = Progress()
    for generation, sent in ((1, 5), (1, 9), (1, 9), (2, 3)):
        progress.done(TrainerFinished(0, generation, 1, {"activations": sent}))
    assert progress.sent_bytes == {"activations": 9 + 3}


def test_steps_that_take_longer_than_the_window_have_a_rate() -> None:
    progress = Progress()
    for now_s in (0.0, 0.1, 12.0, 12.1, 24.0, 24.1, 36.0, 36.1):
        progress.step(msgspec.structs.replace(step(5.0), duration_s=12.0, at_s=now_s))
    assert progress.recent_samples_per_s() == pytest.approx(8 / 12, rel=0.2)
