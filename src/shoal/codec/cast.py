"""float32 values as bfloat16 or float16 on the wire: half the bytes, rounded to nearest, ties to even.

Relative error of one cast: at most 2^-8 (bfloat16, whose range is that of float32) or 2^-11 (float16, from 6.1e-5 to
65504; below, at most 3.0e-8 absolute). A finite value beyond the range becomes the largest one within, so that a cast
never makes an infinity or a NaN out of a number; those that are there stay.

Casting what has been cast already changes nothing: whoever passes a value on passes on the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codec.base import NO_STATE, CodecState, Encoded
from shoal.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Values as `dtype`; see `codec.base.Codec`."""

    name: str
    dtype: torch.dtype
    is_elementwise: ClassVar[bool] = True

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        if dtype != torch.float32:
            raise LocalProtocolError(f"values of {dtype} cannot be cast to {self.name}")
        return (self.dtype,)

    def max_size_bytes(self, num_elements: int) -> int:
        return num_elements * self.dtype.itemsize

    def initial_state(self, num_elements: int) -> CodecState:
        return NO_STATE

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        """See `Codec.encode`; in memory of its own."""
        encoded_N = values_N.to(self.dtype)
        infinite_N = encoded_N.isinf()
        if infinite_N.any():
            largest = torch.finfo(self.dtype).max
            is_beyond_N = infinite_N & values_N.isfinite()
            encoded_N = torch.where(is_beyond_N, values_N.clamp(-largest, largest).to(self.dtype), encoded_N)
        return Encoded((encoded_N,))

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; exact."""
        [encoded_N] = tensors
        return encoded_N.to(torch.float32) if out_N is None else out_N.copy_(encoded_N)

    def sent(self, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor | None:
        return None

    def rounded(self, values_N: Tensor) -> Tensor:
        return self.decode(self.encode(values_N).tensors)


BF16 = CastCodec("bf16", torch.bfloat16)
FP16 = CastCodec("fp16", torch.float16)
