"""float32 values as bfloat16 and float16: half the bytes, bounded errors, nothing that becomes infinite."""

from __future__ import annotations

import pytest
import torch

from shoal.codec.cast import BF16, FP16, CastCodec
from shoal.errors import LocalProtocolError

CASTS = [BF16, FP16]
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("cast", "error"), [(BF16, 2**-8), (FP16, 2**-11)])
def test_a_cast_is_off_by_no_more_than_it_says(cast: CastCodec, error: float) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).clamp(min=6.2e-5)
    found = ((cast.rounded(values) - values) / values).abs().max().item()
    assert error / 2 < found <= error
    assert cast.encode(values).tensors[0].nbytes * 2 == values.nbytes


@pytest.mark.parametrize("cast", CASTS)
def test_a_number_never_becomes_infinite_and_what_is_stays_so(cast: CastCodec) -> None:
    values = torch.tensor([70_000.0, -3.4028e38, INF, -INF, NAN])
    result = cast.rounded(values)
    assert result.isfinite().tolist() == [True, True, False, False, False]
    assert result[2:4].tolist() == [INF, -INF]
    assert result[4].isnan()
    if cast is FP16:
        assert result[:2].tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("cast", CASTS)
def test_nothing_but_float32_is_cast(cast: CastCodec) -> None:
    with pytest.raises(LocalProtocolError, match=f"float64 cannot be cast to {cast.name}"):
        cast.wire_dtypes(torch.float64)
