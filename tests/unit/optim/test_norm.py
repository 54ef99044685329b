"""The squared norm that clipping goes by, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.optim import norm
from shoal.optim.norm import all_finite, squared_norm


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(value: float, dtype: torch.dtype) -> None:
    largest = torch.full((40_001,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite([largest, -largest, torch.empty(0, dtype=dtype)])
    for place in (0, 20_000, 40_000):
        broken = largest.clone()
        broken[place] = value
        assert not all_finite([largest, broken.requires_grad_()])


def test_of_nothing_all_is_finite() -> None:
    assert all_finite([])


def test_where_nothing_is_promised_of_nan_each_value_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_EXTREMES_OF", ())
    assert all_finite([torch.ones(3)])
    assert not all_finite([torch.ones(3), torch.tensor([1.0, math.nan])])
