"""What an endpoint knows of one peer."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from shoal.transport.connection import Connection
from shoal.wire.messages import Traffic

Buffers = list[bytearray | memoryview]


@dataclass(slots=True)
class PeerState:
    """Its connection, or the attempt to make one.

    Attributes:
        addresses: where it can be dialled.
        connection: the one in use.
        dial: the attempt that is under way, if `dialling`.
        losing: `PeerLost` events that the consumer has not taken yet.
        previous: number of the last connection that ended.
        instance: random number of the peer's process.
        waiting, waiting_bytes: frames for the connection to come.
        decided: set when the dialling ended, with a connection or without.
    """

    addresses: tuple[str, ...] = ()
    connection: Connection | None = None
    dial: Connection | None = None
    dialling: bool = False
    losing: int = 0
    previous: int = 0
    instance: int = 0
    waiting: list[tuple[Buffers, int, Traffic]] = field(default_factory=list[tuple[Buffers, int, Traffic]])
    waiting_bytes: int = 0
    decided: anyio.Event = field(default_factory=anyio.Event)

    @property
    def queued_bytes(self) -> int:
        """Bytes for this peer that no socket has taken yet."""
        return self.waiting_bytes + (self.connection.queued_bytes if self.connection is not None else 0)
