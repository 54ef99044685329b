"""Content that peers get from each other, in chunks that are checked one by one (docs/protocol.md, "Transfer").

who wants it                         who may have it
  | -- Want ----------------------->  |
  | <- Have / Missing                 |
  | -- Read ----------------------->  |   several at a time, from several peers
  | <- Chunk / Missing                |
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from shoal.ids import Stage
from shoal.wire.messages.base import Count, HeldRound, Struct

Digest = Annotated[str, msgspec.Meta(max_length=64)]
"""A SHA-256 in hex. Whoever answers repeats the name, and the answer is a longer message."""


class ContentKind(enum.StrEnum):
    """What a content is: the state of a stage that a record names; what the ring of its round has made of the
    contributions, from which that state follows; a replica at a step boundary; what its inner optimizer knows; the
    weights of a stage that the run begins from; or what its pseudo-gradient of a round is encoded as."""

    STATE = "state"
    AVERAGE = "average"
    SNAPSHOT = "snapshot"
    INNER = "inner"
    START = "start"
    PAYLOAD = "payload"

    @property
    def leads_to_record(self) -> bool:
        """Whether it gives a newcomer the state that a record names, or the run begins from."""
        return self in (ContentKind.STATE, ContentKind.AVERAGE, ContentKind.START)


class ContentName(Struct, frozen=True):
    """Names a content of one stage. `digest` is the hash of the record, or what stands for D_0; of a snapshot and an
    inner state the SHA-256 of the hashes of its chunks; of a payload its own SHA-256. All in hex."""

    kind: ContentKind
    stage: Stage
    digest: Digest


class Want(Struct, frozen=True, tag="want"):
    """Does the receiver have it?"""

    name: ContentName


class Have(Struct, frozen=True, tag="have"):
    """It does. `chunk_hashes` are the SHA-256 of its chunks, 32 bytes each, one vector after the other. Those of a
    state are outer parameters, outer momentum, floating and integer buffers; of an average and a start the same without
    momentum; a snapshot, an inner state and a payload are one vector."""

    name: ContentName
    chunk_hashes: bytes


class Missing(Struct, frozen=True, tag="missing"):
    """It does not, or not any more. `base_round` is the newest record whose state of this stage the sender gives (-1:
    none)."""

    name: ContentName
    base_round: HeldRound


class Read(Struct, frozen=True, tag="read"):
    """Send a chunk of it."""

    name: ContentName
    chunk: Count


class Chunk(Struct, frozen=True, tag="chunk"):
    """The chunk. One tensor of bytes."""

    name: ContentName
    chunk: Count


TransferMessage = Want | Have | Missing | Read | Chunk
