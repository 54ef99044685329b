"""The squared norm that clipping goes by."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.optim.norm import squared_norm


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7, 5), (1 << 16,), ((1 << 16) + 1,), (3, 1 << 16)])
def test_it_is_the_sum_of_squares_in_float64(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = squared_norm(gradient)
    assert (found.dtype, found.shape) == (torch.float64, ())
    torch.testing.assert_close(found, gradient.double().square().sum(), rtol=1e-14, atol=0)


def test_strides_change_no_bit_and_the_gradient_stays() -> None:
    gradient = torch.randn(300, 400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    strided, before = gradient.t().contiguous().t(), gradient.clone()
    assert torch.equal(squared_norm(gradient), squared_norm(strided))
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    assert not squared_norm(torch.tensor([1.0, value])).isfinite()
