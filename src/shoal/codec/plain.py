"""The codec that changes nothing: values of any dtype as they are, in their own memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from shoal.codec.base import NO_STATE, CodecState, Encoded


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """See `codec.base.Codec`."""

    name: str = "none"
    is_elementwise: ClassVar[bool] = True

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (dtype,)

    def max_size_bytes(self, num_elements: int) -> int:
        return num_elements * torch.float32.itemsize

    def initial_state(self, num_elements: int) -> CodecState:
        return NO_STATE

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        return Encoded((values_N,))

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        [values_N] = tensors
        return values_N if out_N is None else out_N.copy_(values_N)

    def sent(self, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor | None:
        return None

    def rounded(self, values_N: Tensor) -> Tensor:
        return values_N


PLAIN: Final = PlainCodec()
