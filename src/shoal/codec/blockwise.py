"""Every value as a code times the scale of its block: int8, int4, and int4_e3m0, whose codes are powers of two.

    int8        codes -127 to 127, blocks of 4,096     4.0 times fewer bytes than float32
    int4        codes -7 to 7, blocks of 256           7.88 times
    int4_e3m0   0 and +-2^-6 to +-1, blocks of 256     7.88 times; as in Streaming DiLoCo (arXiv 2501.18512)

A section: the scales of its blocks (bfloat16), then its codes. Two codes of four bits share a byte: byte j of a block
has that of element j in its lower half, and that of element j + H in the upper one; H is half the block, rounded up.

A value becomes the nearest level (at equal distance: the even code, or the larger power). So it lies between the half
and the double of what is sent, or nothing is sent: the difference of the two is exact (Sterbenz), and `sent + left`
gives the value again, bit for bit.

Arrays: R = blocks, C = elements of a block, H = bytes of a block of four-bit codes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

import numpy as np

from shoal.codec.payload import Bytes, Floats, PayloadForm, PayloadReader, magnitude_bits, scale_bytes, upper_scales

_LOWER_HALF: Final = np.uint8(0x0F)
_HALF: Final = np.uint8(4)
_SIGN: Final = np.uint8(0x80)
_FRACTION_BITS: Final = np.uint32(23)
_HALF_FRACTION: Final = np.uint32(1 << 22)
_BELOW_FIRST: Final = np.uint8(127 - 7)
"""The exponent, as float32 has it, under that of the smallest power."""
_LEAST_SENT: Final = np.float32(2.0**-7)
"""Half the smallest power."""


class Int8Form(PayloadForm):
    """Linear codes of eight bits."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 1
    row_elements: ClassVar[int] = 4096

    def max_bytes(self, rows: int, columns: int) -> int:
        return rows * (2 + columns)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        scales_R = _scales(values_RC, 127)
        quotients_RC = _quotients(values_RC, scales_R, left_RC)
        codes_RC = np.rint(quotients_RC, out=quotients_RC).astype(np.int8)
        np.multiply(codes_RC, scales_R[:, None], out=left_RC)
        np.subtract(values_RC, left_RC, out=left_RC)
        return [scale_bytes(scales_R), codes_RC.view(np.uint8).reshape(-1)]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        rows, columns = out_RC.shape
        scales_R = source.take_scales(rows)
        out_RC[...] = source.take(rows * columns).view(np.int8).reshape(rows, columns)
        out_RC *= scales_R[:, None]


class _Int4Form(PayloadForm):
    """Codes of four bits."""

    row_elements: ClassVar[int] = 256
    _largest: ClassVar[int]
    """What the largest code stands for, before the scale."""

    def max_bytes(self, rows: int, columns: int) -> int:
        return rows * (2 + (columns + 1) // 2)

    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        columns = values_RC.shape[1]
        half = (columns + 1) // 2
        scales_R = _scales(values_RC, self._largest)
        codes_RC = self._codes(_quotients(values_RC, scales_R, left_RC))
        packed_RH = codes_RC[:, :half] & _LOWER_HALF
        packed_RH[:, : columns - half] |= codes_RC[:, half:] << _HALF
        self._put(packed_RH, left_RC)
        left_RC *= scales_R[:, None]
        np.subtract(values_RC, left_RC, out=left_RC)
        return [scale_bytes(scales_R), packed_RH.reshape(-1)]

    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        rows, columns = out_RC.shape
        half = (columns + 1) // 2
        scales_R = source.take_scales(rows)
        self._put(source.take(rows * half).reshape(rows, half), out_RC)
        out_RC *= scales_R[:, None]

    def _put(self, packed_RH: Bytes, out_RC: Floats) -> None:
        """Set what the codes stand for, before the scale."""
        rest, half = out_RC.shape[1] // 2, packed_RH.shape[1]
        self._put_upper(packed_RH << _HALF, out_RC[:, :half])
        self._put_upper(packed_RH[:, :rest], out_RC[:, half:])

    @abstractmethod
    def _codes(self, quotients_RC: Floats) -> Bytes:
        """The codes of values that have been divided by their scale, in the lower four bits; it may change those."""

    @abstractmethod
    def _put_upper(self, packed_RH: Bytes, out_RH: Floats) -> None:
        """Set what the codes in the upper four bits stand for, before the scale."""


class LinearInt4Form(_Int4Form):
    """Linear codes of four bits."""

    name: ClassVar[str] = "int4"
    number: ClassVar[int] = 2
    _largest: ClassVar[int] = 7

    def _codes(self, quotients_RC: Floats) -> Bytes:
        return np.rint(quotients_RC, out=quotients_RC).astype(np.int8).view(np.uint8)

    def _put_upper(self, packed_RH: Bytes, out_RH: Floats) -> None:
        out_RH[...] = packed_RH.view(np.int8) >> np.int8(4)


class E3M0Int4Form(_Int4Form):
    """Signed powers of two as codes: the highest bit is the sign, the others 0 for zero, else the exponent + 7."""

    name: ClassVar[str] = "int4_e3m0"
    number: ClassVar[int] = 3
    _largest: ClassVar[int] = 1

    def _codes(self, quotients_RC: Floats) -> Bytes:
        sign_RC = np.signbit(quotients_RC).view(np.uint8) << np.uint8(3)
        magnitude_RC = np.abs(quotients_RC)
        # Between a half and three quarters of the smallest power, that one is nearer than zero.
        is_sent_RC = (magnitude_RC >= _LEAST_SENT).view(np.uint8)
        # The exponent of the nearest power: one and a half is where the next one begins.
        bits_RC = magnitude_RC.view(np.uint32)
        bits_RC += _HALF_FRACTION
        bits_RC >>= _FRACTION_BITS
        exponent_RC = bits_RC.astype(np.uint8)
        code_RC = np.maximum(exponent_RC, _BELOW_FIRST) - _BELOW_FIRST
        return np.maximum(code_RC, is_sent_RC) | sign_RC

    def _put_upper(self, packed_RH: Bytes, out_RH: Floats) -> None:
        code_RH = packed_RH >> _HALF & np.uint8(7)
        exponent_RH = code_RH + np.minimum(code_RH, 1) * _BELOW_FIRST
        bits_RH = exponent_RH.astype(np.uint32) << _FRACTION_BITS
        bits_RH |= (packed_RH & _SIGN).astype(np.uint32) << np.uint32(24)
        out_RH[...] = bits_RH.view(np.float32)


def _scales(values_RC: Floats, largest: int) -> Floats:
    """By block: the least scale with which no value goes beyond the largest code."""
    highest_R = magnitude_bits(values_RC).max(axis=1, initial=0).view(np.float32)
    return upper_scales(highest_R / np.float32(largest))


def _quotients(values_RC: Floats, scales_R: Floats, out_RC: Floats) -> Floats:
    """Values by scale, zero where that is zero."""
    divisors_R = np.where(scales_R == 0, np.float32(np.inf), scales_R)
    return np.divide(values_RC, divisors_R[:, None], out=out_RC)
