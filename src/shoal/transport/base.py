"""What every transport offers: one endpoint per process, one connection per peer, losses as events.

A connection's end is the failure signal of the whole system: exactly one `PeerLost` follows a connection (or an attempt
to make one). From the moment the connection ended until that event is taken from `events()`, whatever is posted to the
peer is dropped with what was still queued; what is posted afterwards dials anew.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.buffer_pool import Memory
from shoal.transport.link_meter import LinkEstimate
from shoal.wire.messages import Hop, Message, Traffic
from shoal.wire.tensors import WireTensor


class Received(msgspec.Struct, frozen=True):  # a struct is made in a fifth of the time of a frozen dataclass
    """A message of `peer` (or of this endpoint itself) with its tensors, which the consumer now owns."""

    peer: PeerId
    message: Message
    tensors: tuple[WireTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerUp:
    """A connection with `peer` stands; comes before anything received over it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The connection with `peer` ended, or none could be made; what was queued for it is dropped.

    `silent_s` is for how long nothing had been heard of the peer if that is why, else 0. `still_s` is for how long this
    process had not run when it found that the peer had closed the connection: most likely the peer has given it up.
    """

    peer: PeerId
    reason: str
    silent_s: float = 0.0
    still_s: float = 0.0


TransportEvent = Received | PeerUp | PeerLost
"""What an endpoint tells its consumer."""


class EventStream(AsyncIterator[TransportEvent]):
    """The events of an endpoint, for one consumer, in order; it ends when the endpoint is closed."""

    @abstractmethod
    async def consume(self, take: Callable[[TransportEvent], None]) -> None:
        """Give every event to `take`, which must not wait, until the stream ends.

        That is the shortest way: while nothing is queued, `take` is called from within the event loop's read callback,
        outside of any task. What it raises is raised here.
        """


class Endpoint(Protocol):
    """One peer's end of all its connections. Every method is called on the event loop's thread.

    Attributes:
        peer_id: who this endpoint is.
        metrics: the numbers of this process: a role has one endpoint, and whatever it counts is counted here.
    """

    peer_id: PeerId
    metrics: MetricRegistry

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where this endpoint can be dialled, as `scheme:rest`."""
        ...

    @property
    def hop(self) -> Hop:
        """Peer id and addresses together, as messages carry them."""
        return Hop(self.peer_id, self.addresses)

    @property
    def sent_bytes(self) -> Mapping[Traffic, int]:
        """Bytes of all frames handed to connections so far, by kind of traffic; loopback is not counted."""
        ...

    @property
    def received_bytes(self) -> int:
        """Bytes of the messages that have come from other peers."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """How often something worth counting happened, by event name (`transport.refused`, ...), 0 if never."""
        return self.metrics.totals()

    def links(self) -> Mapping[PeerId, LinkEstimate]:
        """Return what is known of the links with all peers that were ever heard of, also by connections before."""
        ...

    def process_of(self, peer: PeerId) -> int | None:
        """The process of a connected peer of this host, as the kernel proves it; None for every other peer."""
        ...

    def is_here(self, peer: PeerId) -> bool:
        """Whether the connection with a peer is over a socket of this host, which only this process's user can open."""
        ...

    def receive_into(self, memory: Callable[[int], Memory]) -> None:
        """Have large tensors lie in what `memory` returns for so many bytes, if they are received over a stream."""
        return

    def introduce(self, hop: Hop) -> None:
        """Remember where a peer can be dialled; a later call replaces an earlier one.

        Where it was dialled with success before it is dialled first all the same.
        """
        ...

    def post(
        self,
        peer: PeerId,
        message: Message,
        tensors: Sequence[WireTensor] = (),
        traffic: Traffic = Traffic.CONTROL,
    ) -> None:
        """Send to a peer, without waiting.

        Messages with tensors, and those of another `traffic` than CONTROL, arrive in the order of the calls and never
        before control messages that were posted earlier. Control messages arrive in the order of the calls; they may
        overtake tensors, and on a connection they do, so that none waits for a large one. All are lost with the peer.

        Over a connection that has nothing else to write, control messages have left when this returns; those of
        `GATHERED` (`wire/messages/feed.py`) at the end of the event loop's turn, or with the next one to this peer.

        Dials on demand, to an address from `introduce`; a peer that has dialled this endpoint needs none. Posting to
        `peer_id` itself delivers a copy locally. Otherwise the tensors' memory is not copied: it must stay unchanged
        until `flushed` returns, or an answer of the peer shows that it has them. The endpoint keeps the memory alive.

        Raises:
            LocalProtocolError: the frame breaks a limit; nothing was sent.
        """
        ...

    async def drained(self, peer: PeerId) -> None:
        """Return when at most the high-water mark of bytes is queued for the peer, or the peer is lost.

        Producers of many or large tensors await it between posts; it is the back-pressure of the transport.
        """
        ...

    async def flushed(self, peer: PeerId) -> None:
        """Return when nothing is queued for the peer, or it is lost: the memory of posted tensors may change again."""
        ...

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Close the connection with the peer, if there is one; `PeerLost` follows at both ends."""
        ...

    def leaves(self, peer: PeerId) -> None:
        """Learn that a peer is about to end for good: once its connection has ended, what is posted to it is dropped.

        Nobody dials it then; it may connect anew by itself.
        """
        ...

    def events(self) -> EventStream:
        """Return the stream of events, for one consumer; it ends when the endpoint is closed."""
        ...

    async def aclose(self) -> None:
        """Write what is queued (for a bounded time), close all connections and release the address."""
        ...
