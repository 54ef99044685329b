"""The plan of a ring all-reduce: who owns which chunk, and in which order its sum is formed.

n members stand in ring order; a vector of N elements is cut into n contiguous chunks, chunk j is owned by member j.

    reduce-scatter   chunk j:  j+1 --> j+2 --> ... --> j      every hop computes received + own
    all-gather       chunk j:  j --> j+1 --> ... --> j-1      every hop stores the owner's bytes and passes them on

(member numbers modulo n). The sum of chunk j is therefore

    ((c[j+1] + c[j+2]) + ...) + c[j]

with c[k] the contribution of member k, each `+` one rounded addition in the vector's dtype. This order is part of the
protocol: a program that has never heard of rings reproduces the result bit for bit from it. Chunks travel in segments,
so that sending, receiving and adding overlap; segments do not change the order, since sums are element by element.
"""

from __future__ import annotations

from dataclasses import dataclass

SEGMENT_BYTES = 1 << 20
"""How much of a chunk travels in one frame."""


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Who does what in one ring all-reduce.

    Attributes:
        num_members: n, at least 1.
        num_elements: N, of the vector that is reduced.
        segment_elements: The most elements of one segment, at least 1.
    """

    num_members: int
    num_elements: int
    segment_elements: int

    def __post_init__(self) -> None:
        if self.num_members < 1 or self.num_elements < 0 or self.segment_elements < 1:
            raise ValueError(f"no ring of {self.num_members} members can reduce {self.num_elements} elements")

    def chunk(self, owner: int) -> range:
        """The elements of the chunk that `owner` owns; sizes differ by at most one, the larger chunks come first."""
        size, larger = divmod(self.num_elements, self.num_members)
        start = owner * size + min(owner, larger)
        return range(start, start + size + (1 if owner < larger else 0))

    def num_segments(self, owner: int) -> int:
        """How many segments the chunk of `owner` has; none if the chunk is empty."""
        return -(-len(self.chunk(owner)) // self.segment_elements)

    def segment(self, owner: int, index: int) -> range:
        """The elements of one segment of the chunk of `owner`.

        Raises:
            ValueError: There is no such chunk or segment; the numbers may be a peer's.
        """
        if not 0 <= owner < self.num_members or not 0 <= index < self.num_segments(owner):
            raise ValueError(f"no segment {index} of chunk {owner} in a ring of {self.num_members} members")
        elements = self.chunk(owner)
        return elements[index * self.segment_elements : (index + 1) * self.segment_elements]

    def next(self, member: int) -> int:
        """The member to whom `member` sends."""
        return (member + 1) % self.num_members

    def first_chunk(self, member: int) -> int:
        """The chunk whose sum starts at `member`: that of the member before it."""
        return (member - 1) % self.num_members

    def ends_reduce(self, member: int, owner: int) -> bool:
        """Whether the sum of the chunk is complete once `member` has added its own."""
        return member == owner

    def passes_gather(self, member: int, owner: int) -> bool:
        """Whether `member` passes the complete chunk on: all do but the one before the owner."""
        return self.next(member) != owner

    def num_received(self, member: int) -> int:
        """How many segments `member` receives until it has the whole sum, both phases together."""
        if self.num_members == 1:
            return 0
        all_segments = sum(self.num_segments(owner) for owner in range(self.num_members))
        return 2 * all_segments - self.num_segments(self.first_chunk(member)) - self.num_segments(member)
