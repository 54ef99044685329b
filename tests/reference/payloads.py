"""The payload codecs once more, one value after the other, in Python's own floats: what they must write and stand for.

It shares no code with `shoal.codec`, and no numpy or torch. A sum, difference, product or quotient of two float32
numbers that is computed in double precision and then rounded to float32 is what float32 arithmetic gives.
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

SECTION = 2**18
NUMBERS = {"int8": 1, "int4": 2, "int4_e3m0": 3, "2bit": 4, "sparse": 5}
ROWS = {"int8": 4096, "int4": 256, "int4_e3m0": 256, "2bit": 256, "sparse": 4096}


class Payload(NamedTuple):
    """Its bytes, what they stand for, and what they leave out."""

    content: bytes
    sent: list[float]
    residual: list[float]


def encoded(
    name: str, values: Sequence[float], residual: Sequence[float] = (), feedback: float = 0.0, kept: int = 256
) -> Payload:
    """Encode float32 values with the codec of this name; `kept` of 4,096 if it is the sparse one."""
    whole = all_f32(values)
    if residual:
        kept_before = all_f32(f32(feedback) * old for old in residual)
        whole = all_f32(old + new for old, new in zip(kept_before, whole, strict=True))
    row = ROWS[name]
    content = struct.pack("<BBHIQ", 1, NUMBERS[name], kept if name == "sparse" else row, 0, len(whole))
    sent: list[float] = []
    for rows in _sections(whole, row):
        section, meant = _section(name, rows, kept)
        content += section
        sent += [value for each in meant for value in each]
    return Payload(content, sent, all_f32(value - got for value, got in zip(whole, sent, strict=True)))


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def all_f32(values: Iterable[float]) -> list[float]:
    """Of many at once, which takes a fifth of the time."""
    return array("f", values).tolist()


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _sections(values: list[float], row: int) -> list[list[list[float]]]:
    rows = [values[start : start + row] for start in range(0, len(values), row)]
    last = [rows.pop()] if rows and len(rows[-1]) < row else None
    each = SECTION // row
    found = [rows[start : start + each] for start in range(0, len(rows), each)]
    return [*found, last] if last else found


def _section(name: str, rows: list[list[float]], kept: int) -> tuple[bytes, list[list[float]]]:
    if name == "int8":
        return _linear(rows, 127, _bytes_of_codes)
    if name == "int4":
        return _linear(rows, 7, _halves_of_codes)
    if name == "int4_e3m0":
        return _powers(rows)
    if name == "2bit":
        return _levels(rows)
    return _sparse(rows, kept)


def _scale(row: list[float], largest: int) -> float:
    """The least bfloat16 that is at least the largest magnitude by the largest code."""
    exact = f32(max(abs(value) for value in row) / largest)
    bits = bits_of(exact)
    if bits % 65536:
        bits = bits - bits % 65536 + 65536
    return _not_tiny(bits)


def _not_tiny(bits: int) -> float:
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value if value >= 2.0**-100 else 0.0


def _bfloat16_bytes(values: list[float]) -> bytes:
    return b"".join(struct.pack("<H", bits_of(value) >> 16) for value in values)


def _linear(rows, largest, written):
    scales = [_scale(row, largest) for row in rows]
    content, sent = _bfloat16_bytes(scales), []
    for row, scale in zip(rows, scales, strict=True):
        # Python rounds halves to even.
        codes = [round(quotient) for quotient in all_f32(value / scale for value in row)] if scale else [0] * len(row)
        content += written(codes)
        sent.append(all_f32(code * scale for code in codes))
    return content, sent


def _bytes_of_codes(codes: list[int]) -> bytes:
    return bytes(code % 256 for code in codes)


def _halves_of_codes(codes: list[int]) -> bytes:
    half = math.ceil(len(codes) / 2)
    upper = [*codes[half:], 0]
    return bytes(lower % 16 + 16 * (upper[place] % 16) for place, lower in enumerate(codes[:half]))


_POWERS = [0.0, *(2.0**exponent for exponent in range(-6, 1))]
# Exactly between two; what is there belongs to the larger.
_MIDDLES = [(lower + upper) / 2 for lower, upper in pairwise(_POWERS)]


def _powers(rows):
    scales = [_scale(row, 1) for row in rows]
    content, sent = _bfloat16_bytes(scales), []
    for row, scale in zip(rows, scales, strict=True):
        codes, meant = [], []
        quotients = all_f32(value / scale if scale else math.copysign(0.0, value) for value in row)
        for quotient in quotients:
            code = bisect(_MIDDLES, abs(quotient))
            is_negative = math.copysign(1.0, quotient) < 0
            codes.append(code + 8 * is_negative)
            meant.append((-_POWERS[code] if is_negative else _POWERS[code]) * scale)
        content += _halves_of_codes(codes)
        sent.append(all_f32(meant))
    return content, sent


def _levels(rows):
    content, signs, sizes, sent = b"", [], [], []
    for row in rows:
        magnitudes = [abs(value) for value in row]
        mean = f32(_sum(magnitudes) / len(row))
        threshold = f32(mean + f32(f32(mean - min(magnitudes)) * 0.25))
        is_larger = [magnitude > threshold for magnitude in magnitudes]
        levels = []
        for wanted in (False, True):
            pairs = zip(magnitudes, is_larger, strict=True)
            those = [magnitude if larger is wanted else 0.0 for magnitude, larger in pairs]
            levels.append(_nearest_bfloat16(f32(_sum(those) / max(1, is_larger.count(wanted)))))
        content += _bfloat16_bytes(levels)
        is_negative = [math.copysign(1.0, value) < 0 for value in row]
        signs += is_negative
        sizes += is_larger
        meant = [levels[larger] for larger in is_larger]
        sent.append([-value if minus else value for value, minus in zip(meant, is_negative, strict=True)])
    return content + _bits(signs) + _bits(sizes), sent


def _sum(values: list[float]) -> float:
    """By halves of the next power of two."""
    size = 1
    while size < len(values):
        size *= 2
    values = values + [0.0] * (size - len(values))
    while len(values) > 1:
        half = len(values) // 2
        values = all_f32(values[place] + values[place + half] for place in range(half))
    return values[0]


def _nearest_bfloat16(value: float) -> float:
    bits = bits_of(value)
    below = bits - bits % 65536
    rest = bits - below
    is_up = rest > 32768 or (rest == 32768 and below // 65536 % 2 == 1)
    return _not_tiny(below + 65536 if is_up else below)


def _bits(found: list[bool]) -> bytes:
    content = bytearray(math.ceil(len(found) / 8))
    for place, bit in enumerate(found):
        content[place // 8] |= bit << place % 8
    return bytes(content)


def _sparse(rows, kept):
    columns = len(rows[0])
    number = math.ceil(kept * columns / 4096)
    chosen = [_largest(row, number) for row in rows]
    picked = [[row[place] for place in places] for row, places in zip(rows, chosen, strict=True)]
    values, meant = _levels(picked)
    width = next(width for width in range(9) if width == 8 or 2**width * 27 >= 13 * columns / number)
    remainders: list[bool] = []
    quotients: list[bool] = []
    for places in chosen:
        before = -1
        for place in places:
            gap, before = place - before - 1, place
            remainders += [bool(gap >> bit & 1) for bit in range(width)]
            quotients += [False] * (gap >> width) + [True]
    # Eight remainders fill whole bytes, also where fewer are left.
    remainders += [False] * (width * (-len(rows) * number % 8))
    unary = _bits(quotients)
    content = struct.pack("<I", len(unary)) + values + _bits(remainders) + unary
    sent = []
    for places, of_chunk in zip(chosen, meant, strict=True):
        whole = [0.0] * columns
        for place, value in zip(places, of_chunk, strict=True):
            whole[place] = value
        sent.append(whole)
    return content, sent


def _largest(row: list[float], number: int) -> list[int]:
    order = sorted(range(len(row)), key=lambda place: (-abs(row[place]), place))
    return sorted(order[:number])
