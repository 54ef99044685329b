"""The plans of the operations: who adds whose part to what, who passes it on to whom, and in which order.

n members stand in ring order. A vector of N elements is cut into chunks. Each chunk has a root, and a tree in which the
other members stand below it; an operation is one or both of these, for each of its chunks:

    sum      a member adds to its own contribution the sums of its children, in their order, and gives it to its parent
    gather   the root's bytes go from each member to the members that copy from it

                      chunks                 root of chunk j   sum    gather
    all-reduce        RING: n, else 1        j                 yes    yes      everybody has the whole sum
    reduce-scatter    n, of given lengths    j                 yes    no       member j has chunk j of the sum
    all-gather        n, of given lengths    j                 no     yes      everybody has everybody's chunk
    broadcast         1                      given             no     yes      everybody has what the root had

The tree is one of three. p is a member's place after the root in ring order, 0 for the root itself:

    RING     a chain:
                 sum      1 --> 2 --> ... --> n-1 --> 0           gather   0 --> 1 --> ... --> n-1
             so the sum is ((c1 + c2) + ...) + c0. In operations with n chunks everybody sends and adds as much as the
             others: for large ones.
    TREE     the parent of p is p without its lowest set bit (a binomial tree), and children are added in ascending
             order: (c0 + c1) + (c2 + c3) for four. The gather takes the same way back. An all-reduce needs 2 log2(n)
             messages one after the other, not 2 (n - 1): for small ones.
    CENTRAL  everybody is a child of the root: ((c0 + c1) + c2) + ...; two messages: for few members.

c<p> is the contribution of the member at place p, each `+` one rounded addition in the vector's dtype. This order is
part of the protocol: a program that has never heard of rings reproduces the result bit for bit from it. Chunks travel
in segments, so that sending, receiving and adding overlap; segments do not change the order, since sums are element by
element.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

SEGMENT_BYTES = 1 << 20
"""How much of a chunk travels in one frame."""

SMALL_BYTES = 1 << 17
"""Vectors up to this size take less time through the centre or the tree than around the ring (docs/performance.md)."""

CENTRAL_MEMBERS = 3
"""Up to so many members, the centre of a small vector is not slower than a tree."""


class Collective(enum.Enum):
    """Along what a chunk travels; see the module."""

    RING = "ring"
    TREE = "tree"
    CENTRAL = "central"


def choose_collective(num_bytes: int, num_members: int) -> Collective:
    """Along what a vector travels: a part of the protocol, since all members have to choose the same.

    Args:
        num_bytes: Size of the vector in its own dtype.
    """
    if num_bytes > SMALL_BYTES:
        return Collective.RING
    return Collective.CENTRAL if num_members <= CENTRAL_MEMBERS else Collective.TREE


def even_lengths(num_elements: int, num_chunks: int) -> list[int]:
    """How long chunks are that differ by at most one element; the longer ones come first."""
    size, larger = divmod(num_elements, num_chunks)
    return [size + (chunk < larger) for chunk in range(num_chunks)]


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """Who does what with one vector in one operation.

    Attributes:
        num_members: n, at least 1.
        chunks: The elements of each chunk, one after the other.
        segment_elements: The most elements of one segment, at least 1.
        first_root: The root of chunk 0; each further chunk's is the next member.
        sums: The roots form the sums of their chunks.
        gathers: The roots' bytes go to everybody.
    """

    collective: Collective
    num_members: int
    chunks: tuple[range, ...]
    segment_elements: int
    first_root: int = 0
    sums: bool = True
    gathers: bool = True

    def __post_init__(self) -> None:
        if self.num_members < 1 or self.segment_elements < 1 or not 0 <= self.first_root < self.num_members:
            raise ValueError(f"{self.num_members} members cannot send {self.segment_elements} elements at a time")

    @classmethod
    def all_reduce(
        cls, collective: Collective, num_members: int, num_elements: int, segment_elements: int
    ) -> CollectivePlan:
        """Everybody ends with the sum of all vectors."""
        num_chunks = num_members if collective is Collective.RING else 1
        return cls(collective, num_members, _chunks(even_lengths(num_elements, num_chunks)), segment_elements)

    @classmethod
    def reduce_scatter(cls, collective: Collective, lengths: Sequence[int], segment_elements: int) -> CollectivePlan:
        """Each member ends with its chunk of the sum."""
        return cls(collective, len(lengths), _chunks(lengths), segment_elements, gathers=False)

    @classmethod
    def all_gather(cls, collective: Collective, lengths: Sequence[int], segment_elements: int) -> CollectivePlan:
        """Everybody ends with the chunks that the members began with."""
        return cls(collective, len(lengths), _chunks(lengths), segment_elements, sums=False)

    @classmethod
    def broadcast(
        cls, collective: Collective, num_members: int, root: int, num_elements: int, segment_elements: int
    ) -> CollectivePlan:
        """Everybody ends with the vector of the root."""
        return cls(collective, num_members, _chunks([num_elements]), segment_elements, root, sums=False)

    @property
    def num_elements(self) -> int:
        """N, of the vector."""
        return self.chunks[-1].stop

    def root(self, chunk: int) -> int:
        """The member at which a chunk is complete first."""
        return (self.first_root + chunk) % self.num_members

    def num_segments(self, chunk: int) -> int:
        """How many segments a chunk has; none if it is empty."""
        return -(-len(self.chunks[chunk]) // self.segment_elements)

    def segment(self, chunk: int, index: int) -> range:
        """The elements of one segment of a chunk.

        Raises:
            ValueError: There is no such chunk or segment; the numbers may be a peer's.
        """
        if not 0 <= chunk < len(self.chunks) or not 0 <= index < self.num_segments(chunk):
            raise ValueError(f"no segment {index} of chunk {chunk} in a {self.collective.value} of {self.num_members}")
        return self.chunks[chunk][index * self.segment_elements : (index + 1) * self.segment_elements]

    def span(self, chunk: int, segments: range) -> range:
        """The elements of consecutive segments of a chunk, at least one.

        Raises:
            ValueError: There are no such segments; the numbers may be a peer's.
        """
        if not segments:
            raise ValueError(f"no segments of chunk {chunk} at all")
        first, last = self.segment(chunk, segments.start), self.segment(chunk, segments.stop - 1)
        return range(first.start, last.stop)

    def children(self, member: int, chunk: int) -> tuple[int, ...]:
        """Whose sums of the chunk `member` adds to its own contribution, in this order."""
        if not self.sums:
            return ()
        if self.collective is not Collective.RING:
            return self._below(member, chunk)
        first = (self.root(chunk) + 1) % self.num_members
        return () if self.num_members == 1 or member == first else ((member - 1) % self.num_members,)

    def parent(self, member: int, chunk: int) -> int | None:
        """To whom `member` gives its sum of the chunk; None for the root and where no sum is formed."""
        if not self.sums or member == self.root(chunk):
            return None
        return (member + 1) % self.num_members if self.collective is Collective.RING else self._above(member, chunk)

    def copies_from(self, member: int, chunk: int) -> int | None:
        """From whom `member` has the complete chunk; None for the root, and if it does not get it."""
        if not self.gathers or member == self.root(chunk):
            return None
        return (member - 1) % self.num_members if self.collective is Collective.RING else self._above(member, chunk)

    def copied_by(self, member: int, chunk: int) -> tuple[int, ...]:
        """To whom `member` passes the complete chunk on."""
        if not self.gathers:
            return ()
        if self.collective is not Collective.RING:
            return self._below(member, chunk)
        following = (member + 1) % self.num_members
        return () if following == self.root(chunk) else (following,)

    def begins_with(self, member: int, chunk: int) -> bool:
        """Whether `member` sends a chunk as it has it, before it has received any of it."""
        if self.sums:
            return member != self.root(chunk) and not self.children(member, chunk)
        return member == self.root(chunk)

    def num_received(self, member: int) -> int:
        """How many segments `member` receives until it has what it is to have, both ways together."""
        return sum(
            self.num_segments(chunk)
            * (len(self.children(member, chunk)) + (self.copies_from(member, chunk) is not None))
            for chunk in range(len(self.chunks))
        )

    def hears_everyone(self, member: int) -> bool:
        """Whether `member` cannot end before every other one has begun."""
        roots = {self.root(chunk) for chunk in range(len(self.chunks)) if self.num_segments(chunk)}
        if self.sums:
            return bool(roots if self.gathers else roots & {member})
        return len(roots | {member}) == self.num_members

    def _place(self, member: int, chunk: int) -> int:
        return (member - self.root(chunk)) % self.num_members

    def _below(self, member: int, chunk: int) -> tuple[int, ...]:
        """Who stands right below a member in the tree or around the centre, in ascending order of their places."""
        n, place = self.num_members, self._place(member, chunk)
        if self.collective is Collective.CENTRAL:
            places = range(1, n) if place == 0 else range(0)
        else:
            # A member that is not the root has others below the lowest set bit of its place.
            bits = range((n - 1).bit_length() if place == 0 else (place & -place).bit_length() - 1)
            places = [place + (1 << bit) for bit in bits if place + (1 << bit) < n]
        return tuple((self.root(chunk) + each) % n for each in places)

    def _above(self, member: int, chunk: int) -> int:
        """Who stands right above a member that is not the root."""
        place = self._place(member, chunk)
        above = 0 if self.collective is Collective.CENTRAL else place & (place - 1)
        return (self.root(chunk) + above) % self.num_members


def _chunks(lengths: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these lengths, one after the other."""
    ends = [0, *itertools.accumulate(lengths)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(ends))
