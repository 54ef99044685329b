"""float32 values as bfloat16 or float16 on the wire: half the bytes, rounded to nearest, ties to even.

Relative error of one cast: at most 2^-8 (bfloat16, whose range is that of float32) or 2^-11 (float16, from 6.1e-5 to
65504; below, at most 3.0e-8 absolute). A finite value beyond the range becomes the largest one within, so that a cast
never makes an infinity or a NaN out of a number; those that are there stay.

Casting what has been cast already changes nothing: whoever passes a value on passes on the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

CASTS: Final[Mapping[str, torch.dtype | None]] = MappingProxyType(
    {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""The wire type for each name in the configuration; None is float32 itself."""


def encode(values_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in a wire type, in memory of their own."""
    encoded_N = values_N.to(dtype)
    infinite_N = encoded_N.isinf()
    if infinite_N.any():
        largest = torch.finfo(dtype).max
        is_beyond_N = infinite_N & values_N.isfinite()
        encoded_N = torch.where(is_beyond_N, values_N.clamp(-largest, largest).to(dtype), encoded_N)
    return encoded_N


def decode(encoded_N: Tensor) -> Tensor:
    """Return the float32 values of a wire type, exactly."""
    return encoded_N.to(torch.float32)


def rounded(values_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a receiver makes of values that travel in a wire type."""
    return decode(encode(values_N, dtype))
