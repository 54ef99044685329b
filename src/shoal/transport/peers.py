"""One connection per peer, whoever dialled it: dialling on demand, waiting frames, losses; over every kind of stream.

State of a peer, by its `PeerState` record:

    idle ----------- post ----------> dialling ---- hello and answer ----> up
    idle, dialling -- its hello ----> up
    dialling, up -- failure, close --> lost (`Losses`) -- consumer takes PeerLost --> idle

Two peers that dial each other at the same time keep the connection that the smaller peer id dialled: it refuses the
other one as a duplicate, and the other side, told so (or seeing the smaller one's hello), waits for that one instead.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

import anyio

from shoal.clock import SystemClock
from shoal.errors import HandshakeError, Offence
from shoal.events.base import emit
from shoal.events.links import TransportUp
from shoal.ids import PeerId, RunId
from shoal.runtime.file_limit import is_for_files
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.admission import Admission
from shoal.transport.base import Endpoint, EventStream, PeerUp, Received
from shoal.transport.buffer_pool import Memory, keep_trimmed
from shoal.transport.carrier import Carrier
from shoal.transport.connection import Connection, ConnectionOwner
from shoal.transport.event_queue import EventQueue
from shoal.transport.heartbeats import beat, on_heartbeat
from shoal.transport.inbound import Inbound
from shoal.transport.limits import UNAWAITED_ROLES, TransportLimits
from shoal.transport.link_meter import LinkEstimate, LinkMeter
from shoal.transport.losses import Loss, Losses
from shoal.transport.peer_state import PeerState
from shoal.transport.refusals import Refusals
from shoal.transport.send_queue import message_bytes
from shoal.transport.unsent import Unsent
from shoal.wire.frame import EncodedFrame, Frame, encode_frame
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.handshake import MAX_ADDRESSES, Hello, Refusal, check_hello
from shoal.wire.messages import Hop, Message, Traffic
from shoal.wire.messages.control import Heartbeat
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)


_TAKES_NOTHING: Final = "it does not take what it is sent"
_MAX_PEERS: Final = 1 << 14
"""With more, those that there has been no connection with are forgotten."""


class StreamEndpoint(Endpoint, ConnectionOwner):
    """The endpoint over connected streams, which its carriers make.

    An asynchronous context manager: it listens inside; leaving flushes and closes it. The body's errors pass unwrapped.
    It counts `transport.dialled`, `.accepted`, `.reconnected`, `.refused` by offence, `.lost` by cause, `.dropped`.
    """

    def __init__(
        self,
        peer_id: PeerId,
        run_id: RunId,
        role: str,
        carriers: Sequence[Carrier],
        limits: TransportLimits,
        metrics: MetricRegistry | None = None,
    ) -> None:
        """Open nothing yet; use `open_endpoint` or `open_unix_endpoint`.

        Args:
            run_id: only peers of the same run are accepted.
            role: what this process does, for the peers' logs.
            carriers: one for each kind of address, in the order in which a peer's addresses are tried.
        """
        self._tasks = anyio.create_task_group()
        self.peer_id = peer_id
        self._run_id = run_id
        self._role = role
        self._carriers = tuple(carriers)
        self._limits = limits
        self._clock = SystemClock()
        self._generation = secrets.randbits(63)
        self._events = EventQueue()
        self._peers = defaultdict[PeerId, PeerState](lambda: PeerState(LinkMeter(self._clock)))
        self._admission = Admission(limits)
        self._inbound = Inbound(self._events, limits, self._source_of)
        self._unsent = Unsent(
            limits.max_unsent_bytes,
            limits.max_unsent_total_bytes,
            lambda peer: self._peers[peer].message_bytes,
            self._source_of,
        )
        self.allocate = self._inbound.pool.allocate
        self._closed = False
        self._beaten_s = self._clock.now_s()
        self._stalled_s, self._woken_s = 0.0, -math.inf
        self._sent: Counter[Traffic] = Counter(dict.fromkeys(Traffic, 0))
        self.metrics = metrics or MetricRegistry()
        self._losses = Losses(self._events, self.metrics)
        self._refusals = Refusals(self.metrics)

    async def __aenter__(self) -> Self:
        # Before it listens: who waits for this process connects while the next socket is still being opened.
        await self._tasks.__aenter__()
        try:
            for carrier in self._carriers:
                await carrier.listen(lambda: Connection(self, self._limits))
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        self._tasks.start_soon(beat, self._at_heartbeat, self._on_silent, self._limits, self._clock, self._on_stall)
        self._tasks.start_soon(keep_trimmed, self._inbound.pool, self._limits.pool_trim_s, self._clock)
        self._tasks.start_soon(self._keep_listening)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        await self.aclose()
        self._tasks.cancel_scope.cancel()
        if isinstance(exc, Exception):
            # The task group would wrap it in a group, although it is none of its tasks that failed.
            await self._tasks.__aexit__(None, None, None)
            return False
        return bool(await self._tasks.__aexit__(exc_type, exc, traceback))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens: as many as a peer takes."""
        return tuple(address for carrier in self._carriers for address in carrier.addresses)[:MAX_ADDRESSES]

    @property
    def sent_bytes(self) -> Mapping[Traffic, int]:
        return self._sent

    @property
    def received_bytes(self) -> int:
        return self._inbound.received_bytes

    def links(self) -> Mapping[PeerId, LinkEstimate]:
        return {peer: state.meter.estimate for peer, state in self._peers.items()}

    def process_of(self, peer: PeerId) -> int | None:
        return self._peers[peer].process if peer in self._peers else None

    def is_here(self, peer: PeerId) -> bool:
        connection = self._peers[peer].connection if peer in self._peers else None
        return connection is not None and connection.proven is None

    def receive_into(self, memory: Callable[[int], Memory]) -> None:
        self._inbound.pool.memory = memory

    def introduce(self, hop: Hop) -> None:
        if len(self._peers) >= _MAX_PEERS and hop.peer not in self._peers:
            self._forget_unmet()
        self._peers[hop.peer].addresses = hop.addresses

    def post(
        self,
        peer: PeerId,
        message: Message,
        tensors: Sequence[WireTensor] = (),
        traffic: Traffic = Traffic.CONTROL,
    ) -> None:
        frame = encode_frame(message, tensors, traffic, self._limits.wire)
        if peer == self.peer_id:
            self._events.put(Received(peer, message, tuple(tensor.copy() for tensor in tensors)))
            return
        state = self._peers[peer]
        if self._closed or self._losses.pending(peer):
            self.metrics.counter("transport.dropped").add()
            return
        if state.connection is not None and state.connection.send_at_once(frame):
            self._sent[traffic] += frame.num_bytes
            return
        queued_bytes = state.queued_bytes
        if queued_bytes and queued_bytes + frame.num_bytes > self._limits.max_queued_bytes:
            most_bytes = self._limits.max_queued_bytes
            self._overload(
                peer, f"{_TAKES_NOTHING}; {queued_bytes} bytes wait for it, and no more than {most_bytes} may"
            )
            return
        too_much = self._unsent.posted(peer, message_bytes(frame))
        if too_much is not None:
            self._overload(too_much[0], f"{_TAKES_NOTHING}; {too_much[1]}")
        if too_much is not None and too_much[0] == peer:
            return
        if state.connection is not None:
            self._send(state.connection, frame)
        else:
            state.wait(frame)
            if not state.dialling:
                state.dialling, state.decided = True, anyio.Event()
                self._tasks.start_soon(self._dial, peer, state)

    async def drained(self, peer: PeerId) -> None:
        state = self._peers.get(peer)
        if state is not None and state.queued_bytes > self._limits.high_water_bytes:
            await self.flushed(peer)

    async def flushed(self, peer: PeerId) -> None:
        state = self._peers.get(peer)
        if state is not None and state.dialling:
            await state.decided.wait()
        if state is not None and state.connection is not None:
            await state.connection.flushed()

    def disconnect(self, peer: PeerId, reason: str) -> None:
        state = self._peers.get(peer)
        if state is not None and (state.connection is not None or state.dialling):
            self._lose(peer, state, reason, Loss.DISCONNECTED)

    def leaves(self, peer: PeerId) -> None:
        self._losses.leaves(peer)

    def events(self) -> EventStream:
        return self._events

    async def aclose(self) -> None:
        """See `Endpoint.aclose`; calling it again does nothing."""
        if self._closed:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._limits.flush_timeout_s):
                for peer in list(self._peers):
                    await self.flushed(peer)
            self._closed = True
            self._stop_listening()
            self._events.close()
            ending = self._admission.connections
            for connection in ending:
                connection.close("endpoint closed", flush=connection.queued_bytes == 0)
            with anyio.move_on_after(self._limits.flush_timeout_s):
                for connection in ending:
                    await connection.ended.wait()

    # Called by connections.

    def on_connect(self, connection: Connection) -> None:
        try:
            if is_for_files(connection.socket.fileno()):
                raise HandshakeError(os.strerror(errno.EMFILE), Offence.CROWDED)
            if connection.prepare is not None:
                connection.prepare(connection.socket)
            leaving = self._admission.connected(connection)
        except (HandshakeError, OSError) as error:
            connection.violated(error)
            return
        if leaving is not None:
            had = "most of all" if leaving.peer is not None else "most in their handshake"
            why = f"has made way for a newer connection: {leaving.source} had {had}"
            self._end_stranger(leaving, HandshakeError(why, Offence.CROWDED))
        if connection.dialled is None:
            self._tasks.start_soon(self._admission.await_hello, connection, self._end_stranger)

    def on_open(self, connection: Connection) -> None:
        try:
            if connection.proven is not None and connection.dialled is None:
                self._admission.proven(connection.proven)
            elif connection.proven is not None and connection.proven != connection.dialled:
                raise HandshakeError(
                    f"dialled {connection.dialled} and got {connection.proven}: another key is there", Offence.IDENTITY
                )
        except HandshakeError as error:
            connection.violated(error)
            return
        if connection.dialled is not None:
            connection.number = secrets.randbits(63)
            connection.say(self._hello(connection.dialled, connection.number))

    def on_handshake(self, connection: Connection, said: Hello | Refusal) -> None:
        if isinstance(said, Refusal):
            connection.close(f"refused by the peer: {said.reason}")
            return
        check_hello(said, run_id=self._run_id, own_peer=self.peer_id, expected=connection.dialled)
        if connection.proven is not None and connection.proven != said.peer:
            raise HandshakeError(
                f"the certificate is for {connection.proven}, the hello is of {said.peer}", Offence.IDENTITY
            )
        state = self._peers[said.peer]
        if state.is_copied(said):
            why = f"two processes use the peer id {said.peer}, as where a disk was copied, and the other one is here"
            raise HandshakeError(why, Offence.IDENTITY)
        if connection.dialled is None:
            duplicate = state.duplicate(said, self.peer_id)
            if duplicate is not None:
                connection.say(Refusal(duplicate, duplicate=True))
                connection.close(duplicate, flush=True)
                return
            connection.say(self._hello(said.peer, said.connection))
            state.addresses = state.addresses or said.addresses
        elif said.connection != connection.number:
            raise HandshakeError(f"{said.peer} answers another hello than ours", Offence.GARBAGE)
        if state.connection is not None:
            self._lose(said.peer, state, "the peer connected anew", Loss.REPLACED)
        self._up(connection, state, said)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        if isinstance(frame.message, Heartbeat):
            on_heartbeat(connection, frame.message, self._limits.high_water_bytes)
        elif connection.peer is not None:
            self._inbound.take(connection, connection.peer, frame)

    def on_part(self, connection: Connection, frames: FrameDecoder) -> None:
        too_much = None if connection.peer is None else self._inbound.part(connection.peer, frames)
        if too_much is not None:
            self._overload(too_much[0], f"it does not end what it sends; {too_much[1]}")

    def on_violation(self, connection: Connection, error: Exception) -> None:
        self._refusals.note(connection, error)

    def on_lost(self, connection: Connection, reason: str) -> None:
        self._admission.ended(connection)
        peer = connection.peer or connection.dialled
        if peer is None:
            return
        state = self._peers[peer]
        if connection.dialled is not None or state.connection is connection:
            state.previous = connection.number
        if state.connection is connection:
            self._lose(peer, state, reason, Loss.CLOSED, still_s=self._still_s())

    # One peer.

    def _hello(self, peer: PeerId, number: int) -> Hello:
        previous = self._peers[peer].previous
        return Hello(self._run_id, self.peer_id, self._role, self.addresses, self._generation, number, previous)

    def _up(self, connection: Connection, state: PeerState, theirs: Hello) -> None:
        """Use this connection from now on."""
        is_waited_for = not UNAWAITED_ROLES & {self._role, theirs.role}
        connection.accept(theirs.peer, theirs.connection, state.meter, is_waited_for=is_waited_for)
        self._admission.introduced(connection)
        if state.generation:
            self.metrics.counter("transport.reconnected").add()
        state.met(theirs)
        state.connection = connection
        if state.dial is not None and state.dial is not connection:
            state.dial.close("the peer's own connection is used")
        self.metrics.counter("transport.accepted" if connection.dialled is None else "transport.dialled").add()
        emit(logger, TransportUp(theirs.peer, theirs.role))
        self._losses.up(theirs.peer)
        self._events.put(PeerUp(theirs.peer))
        for frame in state.take_waiting():
            self._send(connection, frame)
        self._end_dialling(state)

    def _source_of(self, peer: PeerId) -> str:
        return self._peers[peer].source

    def _send(self, connection: Connection, frame: EncodedFrame) -> None:
        self._sent[frame.traffic] += frame.num_bytes
        connection.send(frame)

    def _lose(
        self,
        peer: PeerId,
        state: PeerState,
        reason: str,
        cause: Loss,
        *,
        silent_s: float = 0.0,
        still_s: float = 0.0,
    ) -> None:
        """Report the end of the connection or of the attempt to make one."""
        connection, state.connection = state.connection, None
        state.take_waiting()
        self._inbound.lost(peer)
        for end in (connection, state.dial):
            if end is not None:
                state.previous = end.number
                end.close(reason)
        self._end_dialling(state)
        if not self._closed:
            self._losses.report(peer, reason, cause, silent_s, still_s)

    def _overload(self, peer: PeerId, why: str) -> None:
        """Lose a peer that too much memory is held for: nobody else is to be short of it."""
        self._lose(peer, self._peers[peer], f"overloaded: {why}", Loss.OVERLOADED)

    def _end_dialling(self, state: PeerState) -> None:
        state.dialling, state.dial = False, None
        state.decided.set()

    def _forget_unmet(self) -> None:
        """Of those that others have only spoken of, the first half makes way: they can speak of any number."""
        unmet = [peer for peer, state in self._peers.items() if state.is_unmet]
        for peer in unmet[: len(unmet) // 2 + 1]:
            del self._peers[peer]

    async def _keep_listening(self) -> None:
        while True:
            await self._clock.sleep_s(self._limits.listen_again_s)
            for carrier in self._carriers:
                await carrier.listen_again()

    def _stop_listening(self) -> None:
        for carrier in self._carriers:
            carrier.stop_listening()

    def _end_stranger(self, connection: Connection, error: HandshakeError) -> None:
        self.on_violation(connection, error)
        connection.close(str(error))

    def _at_heartbeat(self) -> list[Connection]:
        """Note that heartbeats are sent now, and return the connections that they go over."""
        self._beaten_s = self._clock.now_s()
        return [state.connection for state in self._peers.values() if state.connection is not None]

    def _still_s(self) -> float:
        """Return for how long this process had not run until now, if that is so long that a peer gives it up; else 0.

        What has arrived meanwhile is read before the next heartbeat, or right after it.
        """
        now_s = self._clock.now_s()
        until_now_s = now_s - self._beaten_s
        if now_s - self._woken_s <= self._limits.heartbeat_s:
            until_now_s = max(until_now_s, self._stalled_s)
        return until_now_s if until_now_s >= self._limits.deadline_s else 0.0

    def _on_stall(self, stalled_s: float) -> None:
        self.metrics.counter("process.stalled_ms").add(round(stalled_s * 1000))
        self._stalled_s, self._woken_s = stalled_s, self._clock.now_s()

    def _on_silent(self, connection: Connection, silent_s: float) -> None:
        if connection.peer is not None and not connection.closing:
            state, reason = self._peers[connection.peer], f"silent for {silent_s:.1f} s"
            self._lose(connection.peer, state, reason, Loss.SILENT, silent_s=silent_s)

    async def _dial(self, peer: PeerId, state: PeerState) -> None:
        """Try the peer's addresses, the shortest way first, until there is a connection, dialled here or there."""
        decided = state.decided
        reasons: list[str] = []
        addresses = state.known_addresses
        known = [(c, a) for c in self._carriers for a in addresses if a.startswith(c.scheme)]
        for carrier, address in known:
            connection = Connection(self, self._limits, dialled=peer)
            state.dial = connection
            try:
                with anyio.fail_after(self._limits.dial_timeout_s):
                    await carrier.connect(address, connection)
                    await connection.settled.wait()
                    if connection.refusal is not None and connection.refusal.duplicate:
                        await decided.wait()
            except TimeoutError:
                connection.close(f"no answer within {self._limits.dial_timeout_s:g} s")
            except OSError as error:
                connection.close(error.strerror or str(error))
            except ValueError as error:
                # What a peer calls an address can be none at all, as a path with a zero byte: no call takes it.
                connection.close(f"it is no address: {error}")
            if decided.is_set():
                if state.connection is connection:
                    state.reached = address
                return
            reasons.append(f"{address}: {connection.reason}")
        reasons += [f"{a}: cannot be dialled from here" for a in addresses if a not in {k for _, k in known}]
        self._lose(peer, state, "; ".join(reasons) or "no known address", Loss.UNREACHABLE)
