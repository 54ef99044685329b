"""What a single frame may contain: checked by the sender as a courtesy and by the receiver before it allocates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.wire.messages import Message
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import RunStatus, StartRound, UpdateReplicas
from shoal.wire.messages.feed import RecordSamples, ReleaseTrainer, WindowsRead
from shoal.wire.messages.mirror import Follow, Mirrored, RunCounts
from shoal.wire.messages.round import CommitRecord, Join, OrderPassed, PrepareRecord, Propose, Restore, RoundState
from shoal.wire.messages.snapshot import OfferSnapshot
from shoal.wire.messages.step import Backward, EvalForward, EvalLabels, Fenced, Forward, Labels
from shoal.wire.messages.transfer import Chunk, Have

MIB: Final = 1 << 20

MAX_CONTEXT: Final = 4
"""Tensors of a sample that every stage gets, at most."""

_ONE: Final = range(1, 2)
_WITH_CONTEXT: Final = range(1, 2 + MAX_CONTEXT)

TENSORS_OF: Final[Mapping[type, range]] = MappingProxyType(
    {
        Forward: _WITH_CONTEXT,
        Labels: _ONE,
        Backward: _ONE,
        EvalForward: _WITH_CONTEXT,
        EvalLabels: _ONE,
        RingPart: _ONE,
        Chunk: _ONE,
    }
)
"""How many tensors may follow a message, by its type; a type that is not listed carries none."""

NO_TENSORS: Final = range(1)

LONG_MESSAGES: Final[frozenset[type]] = frozenset(
    {
        RoundState,
        Join,
        Propose,
        PrepareRecord,
        CommitRecord,
        Restore,
        OrderPassed,
        Follow,
        Mirrored,
        RunCounts,
        Have,
        OfferSnapshot,
        RecordSamples,
        ReleaseTrainer,
        WindowsRead,
        Fenced,
        RunStatus,
        StartRound,
        UpdateReplicas,
    }
)
"""Messages that contain a whole round's logs, records, sample ranges, marks of a stream, a content's hashes or all
peers, and may be that long: of as many peers as an endpoint has connections with, each with as many addresses as a
`Hop` may have."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Largest frame parts that are sent and accepted.

    Attributes:
        max_message_bytes: longest encoded message of an ordinary type.
        max_long_message_bytes: longest encoded message of the types in `LONG_MESSAGES`.
    """

    max_message_bytes: int = MIB
    max_long_message_bytes: int = 16 * MIB
    max_tensor_bytes: int = 1024 * MIB

    def body_bytes_of(self, message_type: type[Message]) -> int:
        """Return the longest encoded form of a message of this type."""
        return self.max_long_message_bytes if message_type in LONG_MESSAGES else self.max_message_bytes

    @property
    def max_body_bytes(self) -> int:
        """Longest encoded message of any type: what is known before the type is."""
        return max(self.max_message_bytes, self.max_long_message_bytes)
