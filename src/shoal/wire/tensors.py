"""A tensor as it travels: element type, shape, and its bytes, with no copy and no tensor library.

Bytes are little-endian and C-contiguous. `codec.raw` turns torch tensors into this form and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.errors import LocalProtocolError

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "float32": 4,
        "float64": 8,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "uint16": 2,
        "uint8": 1,
        "bool": 1,
    }
)
"""Every element type that may travel, with the bytes of one element."""

MAX_DIMENSIONS: Final = 8
"""Longest shape that may travel."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor on its way.

    The sender must leave the memory behind `data` unchanged until the endpoint has written it (see
    `transport.base.Endpoint.post`); the receiver owns the tensor and may write to it.

    Attributes:
        dtype: a key of `ITEM_BYTES`.
        shape: at most `MAX_DIMENSIONS` sizes; empty for a scalar.
        data: flat view of unsigned bytes, exactly as many as dtype and shape say.

    Raises:
        LocalProtocolError: on construction, if the three do not fit each other.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LocalProtocolError(
                f"tensors of type {self.dtype!r} cannot travel; use one of {', '.join(ITEM_BYTES)}"
            )
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise LocalProtocolError(f"shape {self.shape} cannot travel: at most {MAX_DIMENSIONS} sizes, none negative")
        if self.data.ndim != 1 or self.data.format != "B" or not self.data.c_contiguous:
            raise LocalProtocolError("tensor data must be a flat contiguous view of unsigned bytes")
        if self.data.nbytes != tensor_bytes(self.dtype, self.shape):
            raise LocalProtocolError(
                f"{self.dtype}{list(self.shape)} takes {tensor_bytes(self.dtype, self.shape)} bytes, "
                f"not {self.data.nbytes}"
            )

    @property
    def num_bytes(self) -> int:
        """Size of the payload in bytes."""
        return self.data.nbytes

    def rows(self, start: int, stop: int) -> WireTensor:
        """Return [start, stop) of the first dimension as a view.

        Raises:
            LocalProtocolError: there are no such rows.
        """
        if not self.shape or not 0 <= start < stop <= self.shape[0]:
            raise LocalProtocolError(f"a tensor of shape {self.shape} has no rows {start} to {stop}")
        row_bytes = self.num_bytes // self.shape[0]
        data = self.data[start * row_bytes : stop * row_bytes]
        return WireTensor(self.dtype, (stop - start, *self.shape[1:]), data)

    def copy(self) -> WireTensor:
        """Return the same tensor in memory of its own."""
        data = empty_bytes(self.num_bytes)
        data[:] = self.data
        return WireTensor(self.dtype, self.shape, data)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of `dtype` (a key of `ITEM_BYTES`) and `shape`."""
    return ITEM_BYTES[dtype] * math.prod(shape)


def empty_bytes(num_bytes: int) -> memoryview:
    """Return writable memory of `num_bytes` bytes with arbitrary content, aligned for every element type.

    A bytearray would be filled with zeros first, which costs as much as receiving the bytes.
    """
    import numpy as np  # a command that asks one question receives no tensor: loading it takes longer than the answer

    return np.empty(num_bytes, dtype=np.uint8).data
