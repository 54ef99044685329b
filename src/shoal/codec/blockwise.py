"""Every value as a code times the scale of its block: int8, int4, and int4_e3m0, whose codes are powers of two.

    int8        codes -127 to 127, blocks of 4,096     4.0 times fewer bytes than float32
    int4        codes -7 to 7, blocks of 256           7.88 times
    int4_e3m0   0 and +-2^-6 to +-1, blocks of 256     7.88 times; as in Streaming DiLoCo (arXiv 2501.18512)

A section: the scales of its blocks (bfloat16), then its codes. Two codes of four bits share a byte: byte j of a block
has that of element j in its lower half, and that of element j + H in the upper one, where H is half the block, rounded up.

A value becomes the nearest level (at equal distance: the even code, or the larger power). So it lies between the half
and the double of what is sent, or nothing is sent: the difference of the two is exact (Sterbenz), and `sent + left`
gives the value again, bit for bit.

Arrays: R = blocks, C = elements of a block, H = bytes of a block of four-bit codes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits, scale_bytes, upper_scales

_LOWER_HALF: Final = np.uint8(0x0F)
_POWERS: Final = np.exp2(np.arange(-6, 1, dtype=np.float32))
_NOTHING: Final = np.zeros(1, np.float32)
_FLOAT_OF_E3M0: Final = np.concatenate([_NOTHING, _POWERS, _NOTHING, -_POWERS])
"""By code: the sign is the highest of its four bits; the others are 0 for zero, else the exponent + 7."""
_FLOAT_OF_INT4: Final = np.array([*range(8), *range(-8, 0)], np.float32)
_FRACTION_BITS: Final = np.uint32(23)
_HALF_FRACTION: Final = np.uint32(1 << 22)
_BELOW_FIRST: Final = np.uint32(127 - 7)
"""The exponent, as float32 has it, under that of the smallest power."""
_LEAST_SENT: Final = np.float32(2.0**-7)
"""Half the smallest power."""


class Int8Form(PayloadForm):
    """Linear codes of eight bits."""

    number: ClassVar[int] = 1
    row_elements: ClassVar[int] = 4096

    @property
    def name(self) -> str:
        return "int8"

    def max_bytes(self, rows: int, columns: int) -> int:
        return rows * (2 + columns)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        scales_R = _scales(values_RC, 127)
        codes_RC = _quotients(values_RC, scales_R, left_RC)
        np.rint(codes_RC, out=codes_RC)
        encoded = codes_RC.astype(np.int8)
        codes_RC *= scales_R[:, None]
        np.subtract(values_RC, codes_RC, out=left_RC)
        return [scale_bytes(scales_R), encoded.view(np.uint8).ravel()]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        rows, columns = out_RC.shape
        scales_R = source.take_scales(rows)
        out_RC[...] = source.take(rows * columns).view(np.int8).reshape(rows, columns)
        out_RC *= scales_R[:, None]


class _Int4Form(PayloadForm):
    """Codes of four bits."""

    row_elements: ClassVar[int] = 256

    _float_of_lower: ClassVar[Floats]
    _float_of_upper: ClassVar[Floats]
    _largest: ClassVar[int]
    """The level of the largest code."""

    def max_bytes(self, rows: int, columns: int) -> int:
        return rows * (2 + (columns + 1) // 2)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        rows, columns = values_RC.shape
        half = (columns + 1) // 2
        scales_R = _scales(values_RC, self._largest)
        codes_RC = self._codes(_quotients(values_RC, scales_R, left_RC))
        packed_RH = codes_RC[:, :half] & _LOWER_HALF
        packed_RH[:, : columns - half] |= codes_RC[:, half:] << 4
        self._put(packed_RH, left_RC)
        left_RC *= scales_R[:, None]
        np.subtract(values_RC, left_RC, out=left_RC)
        return [scale_bytes(scales_R), packed_RH.ravel()]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        rows, columns = out_RC.shape
        half = (columns + 1) // 2
        scales_R = source.take_scales(rows)
        self._put(source.take(rows * half).reshape(rows, half), out_RC)
        out_RC *= scales_R[:, None]

    def _put(self, packed_RH: Bytes, out_RC: Floats) -> None:
        """Set what the codes stand for, before the scale."""
        half = packed_RH.shape[1]
        out_RC[:, :half] = self._float_of_lower[packed_RH]
        out_RC[:, half:] = self._float_of_upper[packed_RH[:, : out_RC.shape[1] - half]]

    @abstractmethod
    def _codes(self, quotients_RC: Floats) -> Bytes:
        """The codes of values that have been divided by their scale, in the lower four bits; it may change those."""


class LinearInt4Form(_Int4Form):
    """Linear codes of four bits."""

    number: ClassVar[int] = 2
    _float_of_lower: ClassVar[Floats] = np.tile(_FLOAT_OF_INT4, 16)
    _float_of_upper: ClassVar[Floats] = np.repeat(_FLOAT_OF_INT4, 16)
    _largest: ClassVar[int] = 7

    @property
    def name(self) -> str:
        return "int4"

    def _codes(self, quotients_RC: Floats) -> Bytes:
        return np.rint(quotients_RC, out=quotients_RC).astype(np.int8).view(np.uint8)


class E3M0Int4Form(_Int4Form):
    """Signed powers of two as codes: three bits of exponent, none of mantissa."""

    number: ClassVar[int] = 3
    _float_of_lower: ClassVar[Floats] = np.tile(_FLOAT_OF_E3M0, 16)
    _float_of_upper: ClassVar[Floats] = np.repeat(_FLOAT_OF_E3M0, 16)
    _largest: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return "int4_e3m0"

    def _codes(self, quotients_RC: Floats) -> Bytes:
        bits_RC = quotients_RC.view(np.uint32)
        sign_RC = (bits_RC >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
        magnitude_RC = np.abs(quotients_RC)
        # The exponent of the nearest power: one and a half is where the next one begins.
        exponent_RC = magnitude_RC.view(np.uint32) + _HALF_FRACTION >> _FRACTION_BITS
        code_RC = np.maximum(exponent_RC, _BELOW_FIRST) - _BELOW_FIRST
        # Between a half and three quarters of the smallest power, that one is nearer than zero.
        code_RC = np.maximum(code_RC, magnitude_RC >= _LEAST_SENT)
        return code_RC.astype(np.uint8) | sign_RC


def _scales(values_RC: Floats, largest: int) -> Floats:
    """By block: the least scale with which no value goes beyond the largest code."""
    highest_R = magnitude_bits(values_RC).max(axis=1, initial=0).view(np.float32)
    return upper_scales(highest_R / np.float32(largest))


def _quotients(values_RC: Floats, scales_R: Floats, out_RC: Floats) -> Floats:
    """Values by scale, zero where that is zero."""
    divisors_R = np.where(scales_R == 0, np.float32(np.inf), scales_R)
    return np.divide(values_RC, divisors_R[:, None], out=out_RC)
