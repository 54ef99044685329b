"""The scale of losses in float16 halves when it is too large, doubles when it was not for long, and rounds nothing."""

from __future__ import annotations

import math

import pytest

from shoal.optim.loss_scale import LossScale
from shoal.swarm.step_operations import LARGEST_LOSS_SCALE, is_loss_scale


def test_no_scale_without_float16() -> None:
    scale = LossScale(is_needed=False)
    for skipped in (True, False, True):
        scale.ended(skipped=skipped)
        assert scale.value == 1.0


def test_each_skipped_step_halves_the_scale_and_2000_finite_ones_in_a_row_double_it() -> None:
    scale = LossScale(is_needed=True)
    assert scale.value == 65536
    for _ in range(3):
        scale.ended(skipped=True)
    assert scale.value == 8192
    for _ in range(1999):
        scale.ended(skipped=False)
    scale.ended(skipped=True)
    assert scale.value == 4096
    for _ in range(2000):
        assert scale.value == 4096
        scale.ended(skipped=False)
    assert scale.value == 8192


def test_the_scale_stays_one_that_replicas_take() -> None:
    low, high = LossScale(is_needed=True), LossScale(is_needed=True)
    for _ in range(40):
        low.ended(skipped=True)
        assert is_loss_scale(low.value)
    for _ in range(40 * 2000):
        high.ended(skipped=False)
    assert (low.value, high.value) == (1.0, LARGEST_LOSS_SCALE)
    assert is_loss_scale(high.value)


@pytest.mark.parametrize("value", [0.0, 0.5, 3.0, -2.0, math.nan, math.inf, 2.0**33])
def test_what_is_no_scale(value: float) -> None:
    assert not is_loss_scale(value)
