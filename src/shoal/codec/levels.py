"""Two bits a value: its sign, and whether its magnitude is of the smaller or the larger ones of its row.

Each row has two levels, the means of its smaller and of its larger magnitudes. Larger is what exceeds

    mean + (mean - smallest) / 4

which is near the threshold of the least squared error for normal values (1.23 means), and for the tail that a selection
of the largest values leaves. R rows of K values, G = R * K, are written as

    levels   of the smaller and the larger ones of each row, bfloat16     4 R bytes
    signs    a bit each, 1 for negative, from the lowest bit of a byte on   G / 8, rounded up
    sizes    a bit each, 1 for larger                                       G / 8, rounded up

A sum is taken by halves, so that it has the same bits however it is computed: a row, filled up with zeros to a power of
two, has its second half added to its first, until one element is left; each sum is rounded to float32.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits, nearest_scales, scale_bytes

_SIGN: Final = np.uint32(31)
_LEVEL_BYTES: Final = 4
"""Both levels of a row."""


def levels_bytes(rows: int, columns: int) -> int:
    """How many bytes values have as levels."""
    return _LEVEL_BYTES * rows + 2 * _plane_bytes(rows * columns)


def write_levels(values_RK: Floats) -> tuple[list[Bytes], Floats]:
    """Return the bytes of values and what they stand for; K > 0."""
    columns = values_RK.shape[1]
    magnitudes_RK = magnitude_bits(values_RK).view(np.float32)
    smallest_R = magnitudes_RK.view(np.int32).min(axis=1).view(np.float32)
    mean_R = _sum_by_halves(magnitudes_RK) / np.float32(columns)
    threshold_R = mean_R + (mean_R - smallest_R) * np.float32(0.25)
    is_larger_RK = magnitudes_RK > threshold_R[:, None]
    larger_RK = magnitudes_RK * is_larger_RK
    num_larger_R = np.add.reduce(is_larger_RK.view(np.uint8), axis=1, dtype=np.uint16)
    levels_R2 = np.empty((len(values_RK), 2), np.float32)
    levels_R2[:, 0] = _mean(magnitudes_RK - larger_RK, columns - num_larger_R)
    levels_R2[:, 1] = _mean(larger_RK, num_larger_R)
    levels_R2 = nearest_scales(levels_R2)
    is_negative_RK = np.signbit(values_RK)
    planes = [np.packbits(plane, bitorder="little") for plane in (is_negative_RK, is_larger_RK)]
    sent_RK = _values(is_negative_RK, is_larger_RK, levels_R2)
    return [scale_bytes(levels_R2.reshape(-1)), *planes], sent_RK


def read_levels(source: PayloadReader, rows: int, columns: int) -> Floats:
    """Return the values of the next bytes, in R rows of K columns.

    Raises:
        RemoteProtocolError: Bytes are missing, or a level is none.
    """
    levels_R2 = source.take_scales(2 * rows).reshape(rows, 2)
    count = rows * columns
    signs_G, sizes_G = (
        np.unpackbits(source.take(_plane_bytes(count)), count=count, bitorder="little") for _ in range(2)
    )
    return _values(signs_G.reshape(rows, columns), sizes_G.reshape(rows, columns), levels_R2)


def pass_levels(source: PayloadReader, rows: int, columns: int) -> None:
    """Pass over the next bytes; the same errors as `read_levels`."""
    source.take_scales(2 * rows)
    source.take(2 * _plane_bytes(rows * columns))


class TwoBitForm(PayloadForm):
    """Every value of a vector, in blocks of 256: 15.05 times fewer bytes than float32."""

    name: ClassVar[str] = "2bit"
    number: ClassVar[int] = 4
    row_elements: ClassVar[int] = 256

    def max_bytes(self, rows: int, columns: int) -> int:
        return levels_bytes(rows, columns)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        parts, sent_RC = write_levels(values_RC)
        np.subtract(values_RC, sent_RC, out=left_RC)
        return parts

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        out_RC[...] = read_levels(source, *out_RC.shape)


def _values(
    is_negative_RK: NDArray[np.bool_] | Bytes, is_larger_RK: NDArray[np.bool_] | Bytes, levels_R2: Floats
) -> Floats:
    # As integers and without a condition: a processor that has to guess signs and sizes is ten times slower.
    level_bits_R2 = levels_R2.view(np.uint32)
    bits_RK = is_larger_RK.astype(np.uint32)
    bits_RK *= level_bits_R2[:, 1:] - level_bits_R2[:, :1]
    bits_RK += level_bits_R2[:, :1]
    bits_RK |= is_negative_RK.astype(np.uint32) << _SIGN
    return bits_RK.view(np.float32)


def _plane_bytes(count: int) -> int:
    return (count + 7) // 8


def _mean(magnitudes_RK: Floats, count_R: NDArray[np.uint16]) -> Floats:
    return _sum_by_halves(magnitudes_RK) / np.maximum(count_R, 1).astype(np.float32)


def _sum_by_halves(values_RK: Floats) -> Floats:
    columns = values_RK.shape[1]
    half = 1 << (columns - 1).bit_length() >> 1
    if half == 0:
        return values_RK[:, 0]
    sums = values_RK[:, :half].copy()
    sums[:, : columns - half] += values_RK[:, half:]
    while half > 1:
        half //= 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
