"""The values of largest magnitude of every chunk of 4,096, two bits each, and where they are.

    density 6.25 %    256 of a chunk    66 times fewer bytes than float32
    density 1.56 %     64 of a chunk   203 times

As SparseLoCo (arXiv 2508.15706) sends a pseudo-gradient. Of K values of a chunk those of largest magnitude are sent; of
equal ones those with the lower index. A shorter last chunk has as many in proportion, rounded up, and at least one.

A section, of R chunks with K values each, G = R * K in all:

    size      bytes of the last part                                                   u32
    levels    two bfloat16 for each chunk (`codec/levels.py`)                          4 R
    codes     of the values, four in a byte from the lowest bits on                    G / 4, rounded up
    places    of the values (`codec/gaps.py`): remainders, then quotients

Arrays: R = chunks, C = elements of a chunk, K = values of a chunk that are sent, G = R * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from shoal.codec.gaps import GapCode
from shoal.codec.levels import LEVEL_BYTES, two_levels, values_of
from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits, scale_bytes

_SIZE_BYTES = 4


@dataclass(frozen=True)
class SparseForm(PayloadForm):
    """See `codec.payload.PayloadForm`.

    Attributes:
        kept: How many values of a whole chunk are sent, 1 to 4,096.
    """

    kept: int
    number: ClassVar[int] = 5
    row_elements: ClassVar[int] = 4096
    sends_all: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "sparse"

    @property
    def parameter(self) -> int:
        return self.kept

    def max_bytes(self, rows: int, columns: int) -> int:
        gaps = self._gap_code(rows, columns)
        levels_and_codes = LEVEL_BYTES * rows + (gaps.count + 3) // 4
        return _SIZE_BYTES + levels_and_codes + gaps.remainder_bytes + gaps.max_quotient_bytes

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        gaps = self._gap_code(*values_RC.shape)
        places_G = _largest(magnitude_bits(values_RC), gaps.kept)
        values_RK = values_RC.reshape(-1)[places_G].reshape(-1, gaps.kept)
        codes_RK, levels_R2 = two_levels(values_RK)
        left_RC[...] = values_RC
        left_RC.reshape(-1)[places_G] -= values_of(codes_RK, levels_R2).reshape(-1)
        remainders, quotients = gaps.encode(places_G)
        size = np.array([len(quotients)], "<u4").view(np.uint8)
        return [size, scale_bytes(levels_R2.ravel()), _packed(codes_RK.ravel()), remainders, quotients]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        gaps = self._gap_code(*out_RC.shape)
        size = self._size(source)
        levels_R2 = source.take_scales(2 * gaps.rows).reshape(-1, 2)
        codes_G = _unpacked(source.take((gaps.count + 3) // 4))[: gaps.count]
        places_G = gaps.read(source, size)
        out_RC[...] = 0
        out_RC.reshape(-1)[places_G] = values_of(codes_G.reshape(-1, gaps.kept), levels_R2).reshape(-1)

    def read_sent(self, source: PayloadReader, out_RC: NDArray[np.bool_]) -> None:
        gaps = self._gap_code(*out_RC.shape)
        size = self._size(source)
        source.take_scales(2 * gaps.rows)
        source.take((gaps.count + 3) // 4)
        out_RC.reshape(-1)[gaps.read(source, size)] = True

    def _size(self, source: PayloadReader) -> int:
        return int(source.take(_SIZE_BYTES).view("<u4")[0])

    def _gap_code(self, rows: int, columns: int) -> GapCode:
        kept = -(-self.kept * columns // self.row_elements)
        return GapCode(rows, columns, kept)


def _largest(magnitudes_RC: NDArray[np.int32], kept: int) -> NDArray[np.int64]:
    """Where the largest ones of each row are, counted through all rows, in order; of equal ones the first."""
    rows, columns = magnitudes_RC.shape
    least_R1 = np.partition(magnitudes_RC, columns - kept, axis=1)[:, columns - kept, None]
    is_kept_RC = magnitudes_RC >= least_R1
    places = np.flatnonzero(is_kept_RC)
    if len(places) == rows * kept:
        return places
    is_tied_RC = magnitudes_RC == least_R1
    num_free_R1 = kept - np.count_nonzero(magnitudes_RC > least_R1, axis=1, keepdims=True)
    is_too_late_RC = is_tied_RC & (np.cumsum(is_tied_RC, axis=1, dtype=np.int32) > num_free_R1)
    return np.flatnonzero(is_kept_RC & ~is_too_late_RC)


def _packed(codes_G: Bytes) -> Bytes:
    filled = np.zeros((len(codes_G) + 3) // 4 * 4, np.uint8)
    filled[: len(codes_G)] = codes_G
    of_four = filled.reshape(-1, 4)
    return of_four[:, 0] | of_four[:, 1] << 2 | of_four[:, 2] << 4 | of_four[:, 3] << 6


def _unpacked(packed: Bytes) -> Bytes:
    codes = np.empty((len(packed), 4), np.uint8)
    for place in range(4):
        np.right_shift(packed, np.uint8(2 * place), out=codes[:, place])
    return codes.reshape(-1)
