"""Where the sent values of a chunk are: the gaps between them in Rice's code (Golomb 1966, Rice 1979).

With B bits of remainder a gap is `quotient * 2^B + remainder`; B is the number with which random places take the fewest
bits, 7.5 a value at a density of 1.56 % and 5.5 at 6.25 %. Remainders and quotients are kept apart, so that both can be
read as vectors:

    remainders   B bits each, eight of them in B bytes, little-endian
    quotients    in unary, one after the other: so many zeros, then a one; from the lowest bit of a byte on

The first gap of a chunk begins at its first element; the next one behind the value before.

Arrays: R = chunks, K = values of a chunk, G = R * K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.codec.payload import Bytes, PayloadReader
from shoal.errors import RemoteProtocolError

_MOST_BITS: Final = 8
"""Eight remainders fit into 64 bits."""
_TOGETHER: Final = 8


@dataclass(frozen=True, slots=True)
class GapCode:
    """The code for `rows` chunks of `columns` elements, of which `kept` each are sent."""

    rows: int
    columns: int
    kept: int

    @property
    def count(self) -> int:
        """G."""
        return self.rows * self.kept

    @property
    def remainder_bits(self) -> int:
        """B: the least one with `2^B >= 0.481 * mean gap`, which is best for random places (Kiely 2004)."""
        bits = 0
        while bits < _MOST_BITS and (self.kept << bits) * 27 < self.columns * 13:
            bits += 1
        return bits

    @property
    def remainder_bytes(self) -> int:
        return -(-self.count // _TOGETHER) * self.remainder_bits

    @property
    def max_quotient_bytes(self) -> int:
        """How many bytes the quotients have at most: all gaps of a chunk lie within it."""
        zeros = self.rows * ((self.columns - self.kept) >> self.remainder_bits)
        return -(-(self.count + zeros) // 8)

    def encode(self, places_G: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """Return remainders and quotients of places, which are in order and counted through all chunks."""
        bits = self.remainder_bits
        starts_R1 = np.arange(self.rows, dtype=np.int64)[:, None] * self.columns
        places_RK = places_G.reshape(self.rows, self.kept) - starts_R1
        gaps_RK = places_RK.copy()
        gaps_RK[:, 1:] -= places_RK[:, :-1] + 1
        gaps_G = gaps_RK.reshape(-1)
        ends_G = np.cumsum(gaps_G >> bits) + np.arange(self.count)
        unary = np.zeros(ends_G[-1] + 1, np.uint8)
        unary[ends_G] = 1
        return self._packed(gaps_G & ((1 << bits) - 1)), np.packbits(unary, bitorder="little")

    def read(self, source: PayloadReader, num_quotient_bytes: int) -> NDArray[np.int64]:
        """Return the places, counted through all chunks.

        Raises:
            RemoteProtocolError: These are no places of so many values in such chunks.
        """
        bits = self.remainder_bits
        remainders_G = self._unpacked(source.take(self.remainder_bytes))[: self.count]
        if num_quotient_bytes > self.max_quotient_bytes:
            raise RemoteProtocolError(f"quotients of {num_quotient_bytes} bytes: at most {self.max_quotient_bytes}")
        unary = np.unpackbits(source.take(num_quotient_bytes), bitorder="little").view(np.bool_)
        places_G = np.flatnonzero(unary)
        if len(places_G) != self.count:
            raise RemoteProtocolError(f"{len(places_G)} places in the chunks of a section, not {self.count}")
        # What has been read of zeros so far, through all chunks; each begins with those before it taken away.
        places_G -= np.arange(self.count)
        places_RK = places_G.reshape(self.rows, self.kept)
        before_R = np.zeros(self.rows, np.int64)
        before_R[1:] = places_RK[:-1, -1]
        places_RK -= before_R[:, None]
        places_RK <<= bits
        places_RK += np.cumsum(remainders_G.reshape(self.rows, self.kept), axis=1, dtype=np.int64)
        places_RK += np.arange(self.kept)
        if int(places_RK[:, -1].max()) >= self.columns:
            raise RemoteProtocolError(f"a gap leads beyond the end of a chunk of {self.columns}")
        places_RK += np.arange(self.rows)[:, None] * self.columns
        return places_G

    def _packed(self, remainders_G: NDArray[np.int64]) -> Bytes:
        filled = np.zeros(-(-self.count // _TOGETHER) * _TOGETHER, np.uint64)
        filled[: self.count] = remainders_G
        words = np.zeros(len(filled) // _TOGETHER, np.uint64)
        for place, remainders in enumerate(filled.reshape(-1, _TOGETHER).T):
            words |= remainders << np.uint64(place * self.remainder_bits)
        return words.astype("<u8").view(np.uint8).reshape(-1, _TOGETHER)[:, : self.remainder_bits].reshape(-1)

    def _unpacked(self, packed: Bytes) -> Bytes:
        bits = self.remainder_bits
        of_words = np.zeros((-(-self.count // _TOGETHER), _TOGETHER), np.uint8)
        of_words[:, :bits] = packed.reshape(-1, bits) if bits else 0
        words = of_words.view("<u8").reshape(-1)
        remainders = np.empty((len(words), _TOGETHER), np.uint8)
        mask = np.uint64((1 << bits) - 1)
        for place in range(_TOGETHER):
            remainders[:, place] = words >> np.uint64(place * bits) & mask
        return remainders.reshape(-1)
