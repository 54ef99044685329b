"""The plans of an all-reduce: who adds whose part to what, and in which order. Three of them, one rule.

n members stand in ring order. A vector of N elements is cut into chunks, and each chunk has a tree of its own with a
root, along which its sum is formed and comes back:

    sum      a member adds to its own contribution the sums of its children, in their order, and gives it to its parent
    gather   the root's bytes go from each member to the members that copy from it

    RING     n chunks, chunk j has root j, and its tree is a chain:
                 sum      j+1 --> j+2 --> ... --> j           gather   j --> j+1 --> ... --> j-1      (modulo n)
             so it is ((c[j+1] + c[j+2]) + ...) + c[j]. Everybody sends and adds as much as the others: for large ones.
    TREE     one chunk; the parent of member m is m without its lowest set bit (a binomial tree, root 0), and children
             are added in ascending order: (c0 + c1) + (c2 + c3) for four. The gather takes the same way back. It needs
             2 log2(n) messages one after the other, not 2 (n - 1): for small ones.
    CENTRAL  one chunk; everybody is a child of member 0: ((c0 + c1) + c2) + ...; two messages: for few members.

c[k] is the contribution of member k, each `+` one rounded addition in the vector's dtype. This order is part of the
protocol: a program that has never heard of rings reproduces the result bit for bit from it. Chunks travel in segments,
so that sending, receiving and adding overlap; segments do not change the order, since sums are element by element.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

SEGMENT_BYTES = 1 << 20
"""How much of a chunk travels in one frame."""

SMALL_BYTES = 1 << 17
"""Vectors up to this size take less time through the centre or the tree than around the ring (docs/performance.md)."""

CENTRAL_MEMBERS = 3
"""Up to so many members, the centre of a small vector is not slower than a tree."""


class Collective(enum.Enum):
    """How a vector is reduced; see the module."""

    RING = "ring"
    TREE = "tree"
    CENTRAL = "central"


def choose_collective(num_bytes: int, num_members: int) -> Collective:
    """Choose how a vector is reduced. This is a part of the protocol: all members must choose the same.

    Args:
        num_bytes: Size of the vector in its own dtype.
    """
    if num_bytes > SMALL_BYTES:
        return Collective.RING
    return Collective.CENTRAL if num_members <= CENTRAL_MEMBERS else Collective.TREE


@dataclass(frozen=True, slots=True)
class AllReducePlan:
    """Who does what in one all-reduce of one vector.

    Attributes:
        num_members: n, at least 1.
        num_elements: N, of the vector that is reduced.
        segment_elements: the most elements of one segment, at least 1.
    """

    collective: Collective
    num_members: int
    num_elements: int
    segment_elements: int

    def __post_init__(self) -> None:
        if self.num_members < 1 or self.num_elements < 0 or self.segment_elements < 1:
            raise ValueError(f"no {self.num_members} members can reduce {self.num_elements} elements")

    @property
    def num_chunks(self) -> int:
        """How many chunks there are; the root of a chunk is the member of its number."""
        return self.num_members if self.collective is Collective.RING else 1

    def chunk(self, root: int) -> range:
        """The elements of a chunk; sizes differ by at most one, the larger chunks come first."""
        size, larger = divmod(self.num_elements, self.num_chunks)
        start = root * size + min(root, larger)
        return range(start, start + size + (1 if root < larger else 0))

    def num_segments(self, root: int) -> int:
        """How many segments a chunk has; none if it is empty."""
        return -(-len(self.chunk(root)) // self.segment_elements)

    def segment(self, root: int, index: int) -> range:
        """The elements of one segment of a chunk.

        Raises:
            ValueError: There is no such chunk or segment; the numbers may be a peer's.
        """
        if not 0 <= root < self.num_chunks or not 0 <= index < self.num_segments(root):
            raise ValueError(f"no segment {index} of chunk {root} in a {self.collective.value} of {self.num_members}")
        elements = self.chunk(root)
        return elements[index * self.segment_elements : (index + 1) * self.segment_elements]

    def span(self, root: int, segments: range) -> range:
        """The elements of consecutive segments of a chunk, at least one.

        Raises:
            ValueError: There are no such segments; the numbers may be a peer's.
        """
        if not segments:
            raise ValueError(f"no segments of chunk {root} at all")
        first, last = self.segment(root, segments.start), self.segment(root, segments.stop - 1)
        return range(first.start, last.stop)

    def children(self, member: int, root: int) -> tuple[int, ...]:
        """Whose sums of the chunk `member` adds to its own contribution, in this order."""
        n = self.num_members
        match self.collective:
            case Collective.RING:
                return () if n == 1 or member == (root + 1) % n else ((member - 1) % n,)
            case Collective.TREE:
                # A member that is not the root has children below its lowest set bit.
                bits = range((n - 1).bit_length() if member == 0 else (member & -member).bit_length() - 1)
                return tuple(member + (1 << bit) for bit in bits if member + (1 << bit) < n)
            case Collective.CENTRAL:
                return tuple(range(1, n)) if member == 0 else ()

    def parent(self, member: int, root: int) -> int | None:
        """To whom `member` gives its sum of the chunk; None for the root, whose sum is complete."""
        if member == root:
            return None
        match self.collective:
            case Collective.RING:
                return (member + 1) % self.num_members
            case Collective.TREE:
                return member & (member - 1)
            case Collective.CENTRAL:
                return 0

    def copies_from(self, member: int, root: int) -> int | None:
        """From whom `member` has the complete chunk; None for the root."""
        if self.collective is Collective.RING:
            return None if member == root else (member - 1) % self.num_members
        return self.parent(member, root)

    def copied_by(self, member: int, root: int) -> tuple[int, ...]:
        """To whom `member` passes the complete chunk on."""
        if self.collective is Collective.RING:
            following = (member + 1) % self.num_members
            return () if following == root else (following,)
        return self.children(member, root)

    def num_received(self, member: int) -> int:
        """How many segments `member` receives until it has the whole sum, both ways together."""
        return sum(
            self.num_segments(root) * (len(self.children(member, root)) + (self.copies_from(member, root) is not None))
            for root in range(self.num_chunks)
        )
