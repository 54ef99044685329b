"""What an endpoint knows of one peer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import anyio

from shoal.ids import PeerId
from shoal.transport.connection import Connection
from shoal.transport.link_meter import LinkMeter
from shoal.transport.send_queue import message_bytes
from shoal.wire.frame import EncodedFrame
from shoal.wire.handshake import Hello

_MAX_EARLIER: Final = 8


@dataclass(slots=True)
class PeerState:
    """The connection with one peer, or the attempt to make one.

    Attributes:
        addresses: where it listens, as it was said last, by whomever.
        reached: the address at which it was dialled last with success; empty: never.
        meter: measures the link over all connections.
        connection: the one in use; None: there is none.
        dial: the attempt that is under way while `dialling`.
        previous: number of the last connection that ended.
        generation: random number of the peer's process.
        earlier: of the processes whose place another one has taken, the last ones.
        waiting, waiting_bytes: frames for the connection to come.
        waiting_message_bytes: of memory that these take without their tensors.
        decided: set when the dialling ended, with a connection or without.
    """

    meter: LinkMeter
    addresses: tuple[str, ...] = ()
    reached: str = ""
    connection: Connection | None = None
    dial: Connection | None = None
    dialling: bool = False
    previous: int = 0
    generation: int = 0
    earlier: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_EARLIER))
    waiting: list[EncodedFrame] = field(default_factory=list[EncodedFrame])
    waiting_bytes: int = 0
    waiting_message_bytes: int = 0
    decided: anyio.Event = field(default_factory=anyio.Event)

    @property
    def known_addresses(self) -> tuple[str, ...]:
        """Where to dial it. Where it has been comes first, so that nobody can keep it from being found there by what he
        says; if it was started again elsewhere, it is found as others say."""
        return tuple(dict.fromkeys((self.reached, *self.addresses))) if self.reached else self.addresses

    @property
    def process(self) -> int | None:
        """The process at the other end of a Unix socket."""
        return None if self.connection is None else self.connection.process

    @property
    def is_unmet(self) -> bool:
        """Whether there never was a connection, and none is being made."""
        return not self.generation and self.connection is None and not self.dialling

    @property
    def queued_bytes(self) -> int:
        """Bytes for this peer that no socket has taken yet."""
        return self.waiting_bytes + (self.connection.queued_bytes if self.connection is not None else 0)

    @property
    def message_bytes(self) -> int:
        """Of memory that messages for this peer take that have not had their turn, without their tensors."""
        return self.waiting_message_bytes + (self.connection.message_bytes if self.connection is not None else 0)

    @property
    def source(self) -> str:
        """The host at the other end of its connection; empty: this one, or there is none."""
        return "" if self.connection is None else self.connection.source

    def wait(self, frame: EncodedFrame) -> None:
        """Keep a frame for the connection to come."""
        self.waiting.append(frame)
        self.waiting_bytes += frame.num_bytes
        self.waiting_message_bytes += message_bytes(frame)

    def take_waiting(self) -> list[EncodedFrame]:
        """Return the frames that have waited, and keep them no more."""
        waiting, self.waiting = self.waiting, []
        self.waiting_bytes = self.waiting_message_bytes = 0
        return waiting

    def is_copied(self, theirs: Hello) -> bool:
        """Whether this is of a process whose place another one has taken, and still has: both live. One that is
        started again is never heard of again."""
        return self.connection is not None and theirs.generation in self.earlier

    def met(self, theirs: Hello) -> None:
        """Note the process with which there is a connection now."""
        if self.generation not in (0, theirs.generation):
            self.earlier.append(self.generation)
        if theirs.generation in self.earlier:
            self.earlier.remove(theirs.generation)
        self.generation = theirs.generation

    def duplicate(self, theirs: Hello, own_peer: PeerId) -> str | None:
        """Return why a connection that the peer dialled is one too many, or None if it is to be used."""
        if self.connection is not None:
            seen_end = theirs.generation != self.generation or theirs.previous == self.connection.number
            return None if seen_end else "connected already"
        own_hello_is_out = self.dial is not None and self.dial.opened and not self.dial.closing
        if own_hello_is_out and own_peer < theirs.peer:
            return "dialled by the refusing side at the same time"
        return None
