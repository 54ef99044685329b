"""What the members of a group say to each other in a collective operation (docs/protocol.md, "Collectives").

member                               neighbour
  | -- RingPart (tensor) ------------>  |   a segment, on its way to the sum or from where it is complete
  | -- RingReady -------------------->  |   the same on one host: it lies in my memory
  | <- RingTaken                        |   I read no more of it

`tag` names the group: bytes that its user makes and nobody else reads. `operation` counts what the group does, from 0.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.ids import Ordinal
from shoal.wire.messages.base import Count, Struct

MAX_TAG_BYTES = 256
"""So that parts which wait for their group cannot fill the memory."""

Tag = Annotated[bytes, msgspec.Meta(max_length=MAX_TAG_BYTES)]


class RingPart(Struct, frozen=True, tag="ring_part"):
    """A segment of a chunk on its way through the ring, the tree or the centre. `gather` is False while the sum is
    formed. One tensor. `buffer` tells the vectors of an operation from each other."""

    tag: Tag
    operation: Count
    gather: bool
    buffer: Count
    chunk: Count
    segment: Count


class SharedVector(Struct, frozen=True):
    """Where a vector lies in the sender's own memory: a file that it has open, and the file's number in the system, so
    that no other one is taken for it. Only good over a connection whose process the kernel proves."""

    descriptor: Count
    inode: int
    offset_bytes: Ordinal


class RingReady(Struct, frozen=True, tag="ring_ready"):
    """In place of `count` RingParts from `segment` on: they are ready in the sender's memory, and stay so until the
    receiver has passed on what it makes of them, or has answered RingTaken."""

    tag: Tag
    operation: Count
    gather: bool
    buffer: Count
    chunk: Count
    segment: Count
    count: Count
    vector: SharedVector


class RingTaken(Struct, frozen=True, tag="ring_taken"):
    """The sender reads nothing more from the receiver's memory in this operation."""

    tag: Tag
    operation: Count


CollectiveMessage = RingPart | RingReady | RingTaken
