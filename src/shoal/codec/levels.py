"""Two bits a value: its sign, and whether its magnitude is of the smaller or the larger ones of its row.

Each row has two levels, the means of the smaller and of the larger magnitudes, as bfloat16. Larger is what exceeds

    mean + (mean - smallest) / 4

which is near the threshold of the least squared error for normal values (1.23 means), and for the tail that a selection
of the largest values leaves. Code: bit 0 is the sign, bit 1 says larger.

A sum is taken by halves, so that it has the same bits however it is computed: a row, filled up with zeros to a power of
two, has its second half added to its first, until one element is left; each sum is rounded to float32.

Arrays: R = rows, K = values of a row.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.codec.payload import Bytes, Floats, nearest_scales

LEVEL_BYTES: Final = 4
"""Both levels of a row."""
_SIGN: Final = np.uint32(31)


def two_levels(values_RK: Floats) -> tuple[Bytes, Floats]:
    """The codes of values, and the levels of their rows (R, 2); K > 0."""
    magnitudes_RK = np.abs(values_RK)
    mean_R = _sum_by_halves(magnitudes_RK) / np.float32(magnitudes_RK.shape[1])
    threshold_R = mean_R + (mean_R - magnitudes_RK.min(axis=1)) * np.float32(0.25)
    is_larger_RK = magnitudes_RK > threshold_R[:, None]
    larger_RK = magnitudes_RK * is_larger_RK
    num_larger_R = np.count_nonzero(is_larger_RK, axis=1)
    num_smaller_R = magnitudes_RK.shape[1] - num_larger_R
    levels_R2 = np.empty((len(values_RK), 2), np.float32)
    levels_R2[:, 0] = _mean(magnitudes_RK - larger_RK, num_smaller_R)
    levels_R2[:, 1] = _mean(larger_RK, num_larger_R)
    sign_RK = (values_RK.view(np.uint32) >> _SIGN).astype(np.uint8)
    return sign_RK | is_larger_RK.view(np.uint8) << 1, nearest_scales(levels_R2)


def values_of(codes_RK: Bytes, levels_R2: Floats) -> Floats:
    """What codes stand for."""
    values_RK = np.where(codes_RK & np.uint8(2), levels_R2[:, 1:], levels_R2[:, :1])
    values_RK.view(np.uint32)[...] |= codes_RK.astype(np.uint32) << _SIGN
    return values_RK


def _mean(magnitudes_RK: Floats, count_R: NDArray[np.int64]) -> Floats:
    return _sum_by_halves(magnitudes_RK) / np.maximum(count_R, 1).astype(np.float32)


def _sum_by_halves(values_RK: Floats) -> Floats:
    columns = values_RK.shape[1]
    half = 1 << (columns - 1).bit_length() >> 1
    sums = values_RK
    if half and columns > half:
        sums = values_RK[:, :half].copy()
        sums[:, : columns - half] += values_RK[:, half:]
    while half > 1:
        half //= 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
