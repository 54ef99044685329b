"""Two bits for every value, with two levels for each block of 256: 15.05 times fewer bytes than float32.

A section: the levels of its blocks (two bfloat16 each), then its codes (`codec/levels.py`), four in a byte. Byte j of a
block has the codes of the elements j, j + Q, j + 2Q and j + 3Q from its lowest bits on, where Q is a quarter of the
block, rounded up.

Arrays: R = blocks, C = elements of a block, Q = bytes of its codes.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.codec.levels import LEVEL_BYTES, two_levels, values_of
from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits, scale_bytes


class TwoBitForm(PayloadForm):
    """See `codec.payload.PayloadForm`."""

    number: ClassVar[int] = 4
    row_elements: ClassVar[int] = 256

    @property
    def name(self) -> str:
        return "2bit"

    def max_bytes(self, rows: int, columns: int) -> int:
        return rows * (LEVEL_BYTES + (columns + 3) // 4)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        magnitude_bits(values_RC)
        codes_RC, levels_R2 = two_levels(values_RC)
        np.subtract(values_RC, values_of(codes_RC, levels_R2), out=left_RC)
        return [scale_bytes(levels_R2.ravel()), _packed(codes_RC).ravel()]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        rows, columns = out_RC.shape
        quarter = (columns + 3) // 4
        levels_R2 = source.take_scales(2 * rows).reshape(rows, 2)
        packed_RQ = source.take(rows * quarter).reshape(rows, quarter)
        for place in range(4):
            taken = out_RC[:, place * quarter : (place + 1) * quarter]
            codes = packed_RQ[:, : taken.shape[1]] >> np.uint8(2 * place)
            taken[...] = values_of(codes, levels_R2)


def _packed(codes_RC: Bytes) -> Bytes:
    rows, columns = codes_RC.shape
    quarter = (columns + 3) // 4
    packed_RQ = codes_RC[:, :quarter].copy()
    for place in range(1, 4):
        codes = codes_RC[:, place * quarter : (place + 1) * quarter]
        packed_RQ[:, : codes.shape[1]] |= codes << np.uint8(2 * place)
    return packed_RQ
