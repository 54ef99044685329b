"""A network within one process: the same rules as real connections, the same order in every run, faults on command.

Frames are encoded and decoded as on a socket (unless switched off), so what does not fit the schema fails here too.
With a seed, control messages now and then overtake tensors that wait in the receiver's queue, as they do on a socket.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import anyio.lowlevel

from shoal.errors import ConfigError, RemoteProtocolError
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import Endpoint, EventStream, PeerUp, Received, TransportEvent
from shoal.transport.event_queue import EventQueue
from shoal.transport.link_meter import LinkEstimate
from shoal.transport.losses import Loss, Losses
from shoal.wire.frame import Frame, encode_frame, is_bulk
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.limits import WireLimits
from shoal.wire.messages import Hop, Message, Traffic
from shoal.wire.messages.control import Heartbeat
from shoal.wire.tensors import WireTensor

DeliverHook = Callable[[PeerId, PeerId, Message], None]
"""Called with sender, receiver and message before each delivery; may cut, kill or heal."""


class MemoryNetwork:
    """Endpoints that reach each other, and the faults between them.

    Delivery happens within `post`: events lie in the receiver's queue in the order in which all messages were posted,
    except for messages that overtake.

    Attributes:
        elsewhere: peers that are on other hosts, see `Endpoint.is_here`. Tests add some.
        is_one_host: whether two peers are told each other's process, as over a Unix socket; by default none are. Tests
            replace it.
    """

    def __init__(self, *, encode: bool = True, seed: int | None = None) -> None:
        """Make an empty network.

        Args:
            encode: pass every message through its encoded form; otherwise only tensors are copied.
            seed: of the choice of control messages that overtake tensors; None: none do.
        """
        self.encode = encode
        self.overtaking = None if seed is None else random.Random(seed)
        self.limits = WireLimits()
        self.before_delivery: DeliverHook | None = None
        self.elsewhere: set[PeerId] = set()
        self.is_one_host: Callable[[PeerId, PeerId], bool] = lambda _here, _there: False
        self._endpoints: dict[PeerId, MemoryEndpoint] = {}
        self._cut: set[frozenset[PeerId]] = set()

    def endpoint(self, peer_id: PeerId) -> MemoryEndpoint:
        """Make the endpoint of a peer that has none, or whose endpoint was closed or killed.

        Raises:
            ConfigError: the peer is there already.
        """
        if peer_id in self._endpoints:
            raise ConfigError(f"peer {peer_id} is on the network already: close or kill it first")
        endpoint = MemoryEndpoint(self, peer_id)
        self._endpoints[peer_id] = endpoint
        return endpoint

    def cut(self, first: PeerId, second: PeerId) -> None:
        """End the connection between two peers and let none be made until `heal`."""
        self._cut.add(frozenset((first, second)))
        self.unlink(first, second, "cut")

    def heal(self, first: PeerId, second: PeerId) -> None:
        """Let two peers connect again."""
        self._cut.discard(frozenset((first, second)))

    def kill(self, peer: PeerId) -> None:
        """End a peer as SIGKILL would: the others lose it, it sees no further event, what it posts goes nowhere."""
        self.remove(peer, "killed")

    def find(self, sender: PeerId, address: str) -> MemoryEndpoint | None:
        """Return the endpoint at an address if `sender` can reach it."""
        peer = PeerId(address.removeprefix("memory:"))
        if not address.startswith("memory:") or frozenset((sender, peer)) in self._cut:
            return None
        return self._endpoints.get(peer)

    def unlink(self, first: PeerId, second: PeerId, reason: str) -> None:
        """End the connection between two peers, if there is one."""
        for here, there in ((first, second), (second, first)):
            endpoint = self._endpoints.get(here)
            if endpoint is not None:
                endpoint.lose(there, reason)

    def remove(self, peer: PeerId, reason: str) -> None:
        """Take a peer off the network."""
        gone = self._endpoints.pop(peer, None)
        if gone is None:
            return
        gone.stop()
        for other in self._endpoints.values():
            other.lose(peer, reason)


class MemoryEndpoint(Endpoint):
    """An endpoint of a `MemoryNetwork`; see `Endpoint` for the rules. Counts `transport.dialled`, `.lost` by cause and
    `.dropped`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self._network = network
        self.peer_id = peer_id
        self._events = EventQueue()
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._linked: dict[PeerId, MemoryEndpoint] = {}
        self._sent: Counter[Traffic] = Counter({traffic: 0 for traffic in Traffic})
        self._received_bytes = 0
        self.metrics = MetricRegistry()
        self._losses = Losses(self._events, self.metrics)
        self._is_stopped = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The one address on the network."""
        return (f"memory:{self.peer_id}",)

    @property
    def sent_bytes(self) -> Mapping[Traffic, int]:
        """Frame bytes sent; zero if the network does not encode."""
        return self._sent

    @property
    def received_bytes(self) -> int:
        """Frame bytes received; zero if the network does not encode."""
        return self._received_bytes

    @property
    def peers(self) -> frozenset[PeerId]:
        """Who is connected."""
        return frozenset(self._linked)

    def links(self) -> Mapping[PeerId, LinkEstimate]:
        """See `Endpoint.links`; of memory nothing is measured."""
        return {peer: LinkEstimate() for peer in self._linked}

    def process_of(self, peer: PeerId) -> int | None:
        """See `Endpoint.process_of`; this process, if the network says that the two are on one host."""
        return os.getpid() if peer in self._linked and self._network.is_one_host(self.peer_id, peer) else None

    def is_here(self, peer: PeerId) -> bool:
        """See `Endpoint.is_here`."""
        return peer not in self._network.elsewhere

    def introduce(self, hop: Hop) -> None:
        self._known[hop.peer] = hop.addresses

    def post(
        self,
        peer: PeerId,
        message: Message,
        tensors: Sequence[WireTensor] = (),
        traffic: Traffic = Traffic.CONTROL,
    ) -> None:
        frame = self._frame(message, tensors, traffic)
        if peer == self.peer_id:
            self._events.put(Received(peer, frame.message, frame.tensors))
            return
        if peer not in self._linked and (self._losses.pending(peer) or not self._dial(peer)):
            self.metrics.counter("transport.dropped").add()
            return
        if self._network.before_delivery is not None:
            self._network.before_delivery(self.peer_id, peer, message)
        target = self._linked.get(peer)
        if target is None:
            self.metrics.counter("transport.dropped").add()
            return
        self._sent[traffic] += frame.num_bytes
        target.deliver(self.peer_id, frame)

    def deliver(self, sender: PeerId, frame: Frame) -> None:
        """Queue a frame of a connected peer; a control frame perhaps before tensors of that peer."""
        if isinstance(frame.message, Heartbeat):
            return
        self._received_bytes += frame.num_bytes
        chance = self._network.overtaking
        may_overtake = chance is not None and not is_bulk(frame.traffic, len(frame.tensors)) and chance.random() < 0.5

        def overtakes(event: TransportEvent) -> bool:
            return isinstance(event, Received) and (event.peer != sender or bool(event.tensors))

        received = Received(sender, frame.message, frame.tensors)
        self._events.put(received, overtakes=overtakes if may_overtake else None)

    async def drained(self, peer: PeerId) -> None:
        """Return after other tasks had their turn: nothing is ever queued for a peer here."""
        await anyio.lowlevel.checkpoint()

    async def flushed(self, peer: PeerId) -> None:
        """Return after other tasks had their turn: nothing is ever queued for a peer here."""
        await anyio.lowlevel.checkpoint()

    def disconnect(self, peer: PeerId, reason: str) -> None:
        if peer in self._linked:
            self._network.unlink(self.peer_id, peer, reason)

    def leaves(self, peer: PeerId) -> None:
        self._losses.leaves(peer)

    def events(self) -> EventStream:
        return self._events

    async def aclose(self) -> None:
        """Leave the network; the others lose this peer."""
        self._network.remove(self.peer_id, "closed")
        await anyio.lowlevel.checkpoint()

    def stop(self) -> None:
        """Forget all connections and end the events; from now on nobody can be reached."""
        self._is_stopped = True
        self._linked.clear()
        self._known.clear()
        self._events.close()

    def lose(self, peer: PeerId, reason: str) -> None:
        """Report a connected peer as lost."""
        if self._linked.pop(peer, None) is not None:
            self._losses.report(peer, reason, Loss.CLOSED)

    def link(self, other: MemoryEndpoint) -> None:
        """Take note that a connection with `other` stands."""
        self._linked[other.peer_id] = other
        self._known.setdefault(other.peer_id, other.addresses)  # a hello carries them
        self._losses.up(other.peer_id)
        self._events.put(PeerUp(other.peer_id))

    def _dial(self, peer: PeerId) -> bool:
        if self._is_stopped:  # who was killed may still come as far as its next await
            return False
        addresses = self._known.get(peer, ())
        self.metrics.counter("transport.dialled").add()
        for address in addresses:
            target = self._network.find(self.peer_id, address)
            if target is not None and target.peer_id == peer:
                self.link(target)
                target.link(self)
                return True
        reason = f"no answer at {', '.join(addresses)}" if addresses else "no known address"
        self._losses.report(peer, reason, Loss.UNREACHABLE)
        return False

    def _frame(self, message: Message, tensors: Sequence[WireTensor], traffic: Traffic) -> Frame:
        """Return what the receiver gets: never the sender's own tensor memory."""
        if not self._network.encode:
            return Frame(message, tuple(t.copy() for t in tensors), traffic, 0)
        decoder = FrameDecoder(self._network.limits)
        frames: list[Frame] = []
        for buffer in encode_frame(message, tensors, traffic, self._network.limits).in_one_piece():
            rest = memoryview(buffer)
            while rest:
                space = decoder.get_buffer()
                num_bytes = min(len(space), len(rest))
                space[:num_bytes] = rest[:num_bytes]
                rest = rest[num_bytes:]
                frames += decoder.advance(num_bytes)
        if len(frames) != 1:
            raise RemoteProtocolError(f"{type(message).__name__} came back as {len(frames)} frames")
        return frames[0]
