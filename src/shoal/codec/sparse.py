"""The values of largest magnitude of every chunk of 4,096, two bits each, and where they are.

    density 6.25 %    256 of a chunk    66 times fewer bytes than float32
    density 1.56 %     64 of a chunk   203 times

As SparseLoCo (arXiv 2508.15706) sends a pseudo-gradient. Of K values of a chunk those of largest magnitude are sent; of
equal ones those with the lower index. A shorter last chunk has as many in proportion, rounded up, and at least one.

A section, of R chunks with K values each:

    size      bytes of the last part, u32
    values    of the chunks as levels (`codec/levels.py`)
    places    of the values (`codec/gaps.py`): remainders, then quotients

Arrays: R = chunks, C = elements of a chunk, K = values of a chunk that are sent, G = R * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shoal.codec.gaps import GapCode
from shoal.codec.levels import levels_bytes, pass_levels, read_levels, write_levels
from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits

_SIZE_BYTES: Final = 4
_TOGETHER: Final = 8


@dataclass(frozen=True)
class SparseForm(PayloadForm):
    """See `codec.payload.PayloadForm`.

    Attributes:
        kept: How many values of a whole chunk are sent, 1 to 4,096.
    """

    kept: int
    name: ClassVar[str] = "sparse"
    number: ClassVar[int] = 5
    row_elements: ClassVar[int] = 4096
    sends_all: ClassVar[bool] = False

    @property
    def parameter(self) -> int:
        return self.kept

    def max_bytes(self, rows: int, columns: int) -> int:
        gaps = self._gap_code(rows, columns)
        return _SIZE_BYTES + levels_bytes(rows, gaps.kept) + gaps.remainder_bytes + gaps.max_quotient_bytes

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        gaps = self._gap_code(*values_RC.shape)
        places_G = _largest(magnitude_bits(values_RC), gaps.kept)
        values_RK = values_RC.reshape(-1)[places_G].reshape(gaps.rows, gaps.kept)
        values, sent_RK = write_levels(values_RK)
        left_RC[...] = values_RC
        left_RC.reshape(-1)[places_G] = (values_RK - sent_RK).reshape(-1)
        remainders, quotients = gaps.encode(places_G)
        size = np.array([len(quotients)], "<u4").view(np.uint8)
        return [size, *values, remainders, quotients]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        gaps = self._gap_code(*out_RC.shape)
        size = self._size(source)
        values_RK = read_levels(source, gaps.rows, gaps.kept)
        places_G = gaps.read(source, size)
        out_RC[...] = 0
        out_RC.reshape(-1)[places_G] = values_RK.reshape(-1)

    def read_sent(self, source: PayloadReader, out_RC: NDArray[np.bool_]) -> None:
        gaps = self._gap_code(*out_RC.shape)
        size = self._size(source)
        pass_levels(source, gaps.rows, gaps.kept)
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
    places = _where(is_kept_RC.reshape(-1))
    if len(places) == rows * kept:
        return places
    is_tied_RC = magnitudes_RC == least_R1
    num_free_R1 = kept - np.count_nonzero(magnitudes_RC > least_R1, axis=1, keepdims=True)
    is_too_late_RC = is_tied_RC & (np.cumsum(is_tied_RC, axis=1, dtype=np.int32) > num_free_R1)
    return _where((is_kept_RC & ~is_too_late_RC).reshape(-1))


def _where(is_kept: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`np.flatnonzero`, in half the time where few are: first for eight at once, then for those with one of them."""
    if len(is_kept) % _TOGETHER:
        return np.flatnonzero(is_kept)
    of_eight = is_kept.view(np.uint64)
    eights = np.flatnonzero(of_eight != 0)
    found = np.flatnonzero(of_eight[eights].view(np.bool_))
    return eights[found // _TOGETHER] * _TOGETHER + found % _TOGETHER
