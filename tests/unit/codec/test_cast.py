"""float32 values as bfloat16 and float16: half the bytes, bounded errors, nothing that becomes infinite."""

from __future__ import annotations

import pytest
import torch

from shoal.codec.cast import CASTS, encode, rounded

TYPES = [dtype for dtype in CASTS.values() if dtype is not None]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_a_cast_is_off_by_no_more_than_it_says(dtype: torch.dtype, error: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).clamp(min=6.2e-5)
    found = ((rounded(values, dtype) - values) / values).abs().max().item()
    assert error / 2 < found <= error
    assert encode(values, dtype).nbytes * 2 == values.nbytes


@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_cast_keeps_its_bits_when_it_is_cast_again(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    values[:5] = torch.tensor([INF, -INF, NAN, 1e38, -1e-38])
    once = rounded(values, dtype)
    assert torch.equal(rounded(once, dtype).view(torch.int32), once.view(torch.int32))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_number_never_becomes_infinite_and_what_is_stays_so(dtype: torch.dtype) -> None:
    values = torch.tensor([70_000.0, -3.4028e38, INF, -INF, NAN])
    result = rounded(values, dtype)
    assert result.isfinite().tolist() == [True, True, False, False, False]
    assert result[2:4].tolist() == [INF, -INF]
    assert result[4].isnan()
    if dtype is torch.float16:
        assert result[:2].tolist() == [65504.0, -65504.0]
