"""Fragments: the parts of a stage's parameters that rounds average in turn (Streaming DiLoCo, arXiv 2501.18512).

    elements of the flat vector   0..4095   4096..8191   8192..12287   12288.. ...
    fragment, of three            0         1            2             0

Round r averages fragment r mod P alone. A fragment is every P-th chunk of 4,096 elements: fragments are equal to a
chunk, each has a part of every large tensor, and no layout is needed to know where one lies. Which one is a round's
follows from its number and the configuration, so no message and no record has to say it.

Shapes: N elements of a flat vector, M of those that are in the fragment, in the order of the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

CHUNK_ELEMENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Fragment:
    """One fragment.

    Attributes:
        number: From 0 on.
        count: P, how many there are; 1: this one is the whole vector.
    """

    number: int = 0
    count: int = 1

    @classmethod
    def of_round(cls, round: int, count: int) -> Fragment:
        """The one that this round averages."""
        return cls(round % count, count)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole vector."""
        return self.count == 1

    @property
    def has_buffers(self) -> bool:
        """Whether its rounds average the buffers too: those of the last fragment do."""
        return self.number == self.count - 1

    def size(self, num_elements: int) -> int:
        """M, how many of N elements are in it."""
        num_chunks, rest = divmod(num_elements, CHUNK_ELEMENTS)
        own = len(range(self.number, num_chunks, self.count)) * CHUNK_ELEMENTS
        return own + (rest if num_chunks % self.count == self.number else 0)

    def take(self, vector_N: Tensor) -> Tensor:
        """Its elements (M): a copy, or the vector itself if that is all of it."""
        if self.is_whole:
            return vector_N
        values_M = vector_N.new_empty(self.size(vector_N.numel()))
        for own, part in self._parts(values_M, vector_N):
            own.copy_(part)
        return values_M

    def put(self, values_M: Tensor, into_N: Tensor) -> Tensor:
        """Write its elements into the vector, which is returned; all others stay."""
        for own, part in self._parts(values_M, into_N):
            part.copy_(own)
        return into_N

    def places(self, parts: Iterable[slice]) -> tuple[slice, ...]:
        """Where parts of the vector lie among the elements of the fragment; what is in another one is left out."""
        if self.is_whole:
            return tuple(parts)
        return tuple(place for part in parts for place in self._places(part))

    def _places(self, part: slice) -> Iterator[slice]:
        for chunk in range(part.start // CHUNK_ELEMENTS, -(-part.stop // CHUNK_ELEMENTS)):
            if chunk % self.count == self.number:
                moved = (chunk // self.count - chunk) * CHUNK_ELEMENTS
                start = max(part.start, chunk * CHUNK_ELEMENTS)
                stop = min(part.stop, (chunk + 1) * CHUNK_ELEMENTS)
                yield slice(start + moved, stop + moved)

    def _parts(self, values_M: Tensor, vector_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the fragment's elements beside views of the same places of the vector."""
        if self.is_whole:
            yield values_M, vector_N
            return
        num_rows = vector_N.numel() // (CHUNK_ELEMENTS * self.count)
        in_rows = num_rows * CHUNK_ELEMENTS
        rows = vector_N[: in_rows * self.count].view(num_rows, self.count, CHUNK_ELEMENTS)
        yield values_M[:in_rows].view(num_rows, CHUNK_ELEMENTS), rows[:, self.number]
        start = in_rows * self.count + self.number * CHUNK_ELEMENTS
        yield values_M[in_rows:], vector_N[start : start + CHUNK_ELEMENTS]
