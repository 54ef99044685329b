"""Two bits for every value, with two levels for each block of 256 (`codec/levels.py`): 15.05 times fewer bytes.

A section is its blocks as levels. Arrays: R = blocks, C = elements of a block.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.codec.levels import levels_bytes, read_levels, write_levels
from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader


class TwoBitForm(PayloadForm):
    """See `codec.payload.PayloadForm`."""

    number: ClassVar[int] = 4
    row_elements: ClassVar[int] = 256

    @property
    def name(self) -> str:
        return "2bit"

    def max_bytes(self, rows: int, columns: int) -> int:
        return levels_bytes(rows, columns)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        parts, sent_RC = write_levels(values_RC)
        np.subtract(values_RC, sent_RC, out=left_RC)
        return parts

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        out_RC[...] = read_levels(source, *out_RC.shape)
