"""The bytes of a payload: a header, then rows in sections; how they are written, and read from who may send anything.

    header   version u8, form u8, parameter u16, zero u32, elements u64                         16 bytes
    section  the next rows of the vector, at most 2^18 elements, as the form says it

A form (`PayloadForm`) cuts a vector of N elements into rows of `row_elements`, and the rest that fills none into one
shorter row, which is a section by itself. Numbers are little-endian; bits that are spare are zero, and not read. How
many bytes a section has follows from its rows, but for what a form counts itself, and it says how many those may be:
what is read is bounded by N, which the reader knows already.

Scales and levels travel as bfloat16: the upper half of a float32. Those below 2^-100 are sent as zero and none may be
above 2^112, so that neither an encoder's sum nor a product of codes and scales leaves the normal range of float32.

Arrays: R = rows, C = elements of a row.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvariantViolation, LocalProtocolError, RemoteProtocolError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

VERSION: Final = 1
SECTION_ELEMENTS: Final = 1 << 18
"""What is worked on at once: it stays in a processor's cache, and takes about a millisecond."""
LARGEST: Final = 2.0**112
SMALLEST_SCALE: Final = 2.0**-100
_HEADER: Final = struct.Struct("<BBHIQ")
_MAGNITUDE: Final = np.uint32(0x7FFF_FFFF)
_LARGEST_BITS: Final = int(np.float32(LARGEST).view(np.uint32))


class PayloadForm(ABC):
    """How rows become bytes; stateless, any thread may call it.

    Attributes:
        number: Its number in the header; never used again for another layout.
        row_elements: C of all rows but the last one; divides `SECTION_ELEMENTS`.
        sends_all: Every element is sent; else `read_sent` says which.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    row_elements: ClassVar[int]
    sends_all: ClassVar[bool] = True

    @property
    def parameter(self) -> int:
        """What sender and receiver must agree on beside the number."""
        return self.row_elements

    @abstractmethod
    def max_bytes(self, rows: int, columns: int) -> int:
        """How many bytes a section has at most."""

    @abstractmethod
    def write(self, values_RC: Floats, left_RC: Floats) -> list[Bytes]:
        """Encode a section, and put what its receivers do not get, `values - decoded`, into `left_RC`.

        Raises:
            LocalProtocolError: A value is NaN, infinite, or not below `LARGEST`.
        """

    @abstractmethod
    def read(self, source: PayloadReader, out_RC: Floats) -> None:
        """Decode a section.

        Raises:
            RemoteProtocolError: No values become these bytes.
        """

    def read_sent(self, source: PayloadReader, out_RC: NDArray[np.bool_]) -> None:
        """Pass over a section, and say which elements it has; `out_RC` is false everywhere before.

        Raises:
            RemoteProtocolError: No values become these bytes.
        """
        raise InvariantViolation(f"{self.name} sends every element: nobody has to ask which")


class PayloadSection(NamedTuple):
    """Rows that are encoded together: elements `start` to before `stop` of the vector."""

    start: int
    stop: int
    rows: int
    columns: int


def sections(num_elements: int, row_elements: int) -> Iterator[PayloadSection]:
    """The sections of a vector in their order."""
    whole = num_elements - num_elements % row_elements
    for start in range(0, whole, SECTION_ELEMENTS):
        stop = min(start + SECTION_ELEMENTS, whole)
        yield PayloadSection(start, stop, (stop - start) // row_elements, row_elements)
    if whole < num_elements:
        yield PayloadSection(whole, num_elements, 1, num_elements - whole)


def header(form: PayloadForm, num_elements: int) -> Bytes:
    """The bytes in front of the sections."""
    return np.frombuffer(_HEADER.pack(VERSION, form.number, form.parameter, 0, num_elements), np.uint8)


def form_number(content: Bytes) -> int:
    """The number of the form that a payload says that it has.

    Raises:
        RemoteProtocolError: It has no header.
    """
    if len(content) < _HEADER.size:
        raise RemoteProtocolError(f"a payload of {len(content)} bytes has no header")
    return int(content[1])


class PayloadReader:
    """A payload, of which more and more has been read.

    Raises:
        RemoteProtocolError: On construction, if the header is not the one that this form and length have.
    """

    def __init__(self, content: Bytes, form: PayloadForm, num_elements: int) -> None:
        self._content = content
        self._position = 0
        self._form = form
        found = _HEADER.unpack(self.take(_HEADER.size).tobytes())
        expected = (VERSION, form.number, form.parameter, 0, num_elements)
        if found != expected:
            names = "version, form, parameter, zero, elements"
            raise RemoteProtocolError(f"a payload of {form.name} has the header {found}, not {expected} ({names})")

    def take(self, size_bytes: int) -> Bytes:
        """The next bytes, as a view."""
        end = self._position + size_bytes
        if end > len(self._content):
            missing = end - len(self._content)
            raise RemoteProtocolError(f"a payload of {len(self._content)} bytes is cut short: {missing} are missing")
        taken = self._content[self._position : end]
        self._position = end
        return taken

    def take_scales(self, count: int) -> Floats:
        """The next bfloat16 scales, which are neither negative, too large, infinite nor NaN."""
        bits = self.take(2 * count).view("<u2").astype(np.uint32) << np.uint32(16)
        if count and int(bits.max()) > _LARGEST_BITS:
            raise RemoteProtocolError(f"a payload of {self._form.name} has a scale that is none: negative or too large")
        return bits.view(np.float32)

    def finish(self) -> None:
        """See that nothing is left."""
        left = len(self._content) - self._position
        if left:
            raise RemoteProtocolError(f"a payload of {self._form.name} has {left} bytes too many")


def scale_bytes(scales: Floats) -> Bytes:
    """Scales that are bfloat16 already, as they travel."""
    return (scales.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)


def nearest_scales(values: Floats) -> Floats:
    """The nearest bfloat16, ties to even, of numbers that are not negative; zero below `SMALLEST_SCALE`."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return _without_smallest(rounded)


def upper_scales(values: Floats) -> Floats:
    """The least bfloat16 that is not below each of these numbers, none negative; zero below `SMALLEST_SCALE`."""
    return _without_smallest(values.view(np.uint32) + np.uint32(0xFFFF))


def _without_smallest(bits: NDArray[np.uint32]) -> Floats:
    scales = (bits & np.uint32(0xFFFF_0000)).view(np.float32)
    return np.where(scales < np.float32(SMALLEST_SCALE), np.float32(0), scales)


def magnitude_bits(values_RC: Floats) -> NDArray[np.int32]:
    """The bits of the absolute values, which are in the order of these.

    Raises:
        LocalProtocolError: One of them is NaN, infinite, or not below `LARGEST`.
    """
    bits_RC = (values_RC.view(np.uint32) & _MAGNITUDE).view(np.int32)
    if int(bits_RC.max(initial=0)) >= _LARGEST_BITS:
        raise LocalProtocolError("a vector with NaN, infinite or huge values (2^112 and more) cannot be encoded")
    return bits_RC
