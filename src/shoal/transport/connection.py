"""One connection: bytes in, frames out and back, with nothing copied on the way that is large.

    connected -- (TLS) --> handshaking -- the peer's Hello, accepted --> framing -- close, error, end --> lost

Without TLS the event loop's transport is the connection's stream; with it, a `TlsStream` is (`tls_stream.py`). Frames
wait in a `SendQueue`, which hands the stream one batch at a time, the next one when the socket has taken all of the
last: what has been handed over cannot be overtaken any more, so it stays short. Writes to a Unix socket go out as they
are: uvloop tries to write at once (one system call for all buffers) and keeps what the socket does not take by
reference: that memory stays alive, and must not change until it is written. Reads go straight into the memory that the
frame decoder names.

Gathered frames leave after the turn of the loop in which they are sent, or with the next frame that is not one: many of
them are one write, and wake the peer once. All others leave at once, so that also over several connections the order is
that of the calls: who is killed has not told one peer what another one was to know before.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

import anyio

from shoal.errors import HandshakeError, InvariantViolation, RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkMeter
from shoal.transport.send_queue import Buffer, SendQueue
from shoal.transport.uplink import Uplink, Urgency
from shoal.wire.frame import EncodedFrame, Frame
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.handshake import HandshakeDecoder, Hello, Refusal, encode_handshake

# A reader that keeps up would otherwise keep the event loop writing until a large tensor is gone.
_BATCHES_PER_TURN: Final = 4


class Stream(Protocol):
    """What a connection needs of its transport; the methods are those of `asyncio.Transport`."""

    def writelines(self, list_of_data: Sequence[Buffer], /) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class ConnectionOwner(Protocol):
    """Where a connection's events go. Called from within the loop's read callback: no detour, no waiting."""

    def on_connect(self, connection: Connection) -> None:
        """The socket is connected; under TLS nobody knows yet who is at the other end."""
        ...

    def on_open(self, connection: Connection) -> None:
        """Bytes can be exchanged (TLS, if there is any, has been set up); nothing has been said yet."""
        ...

    def on_handshake(self, connection: Connection, said: Hello | Refusal) -> None:
        """The peer said hello, or refused.

        Raises:
            HandshakeError: the peer does not fit.
        """
        ...

    def allocate(self, num_bytes: int) -> memoryview:
        """Return writable memory for a received tensor, which whoever takes the frame then owns."""
        ...

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A frame is complete."""
        ...

    def on_part(self, connection: Connection, frames: FrameDecoder) -> None:
        """A part of a long frame has come, or the last one, so that `frames` holds other memory than before."""
        ...

    def on_violation(self, connection: Connection, error: Exception) -> None:
        """The peer broke a rule; `connection` closes itself after this."""
        ...

    def on_lost(self, connection: Connection, reason: str) -> None:
        """The connection ended; called exactly once, also if it never stood."""
        ...


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one socket.

    Attributes:
        dialled: the peer that this side meant to reach; None: the other side dialled.
        peer: the other end, once `accept` was called.
        proven: the other end, by its certificate; None without TLS.
        prepare: sets the socket's options, and checks what the kernel knows of the other end; the carrier's.
        process: the other end of a Unix socket, by the id that the kernel proves; None: not known.
        source: host at the other end of a TCP connection; empty for a Unix socket.
        number: the connection's random number, from the dialler's Hello.
        meter: measures the link with the peer, once `accept` was called.
        is_waited_for: whether a step or a round may wait for the peer, or for this process, once `accept` was called.
        heard, spoke: whether anything was received or sent since the heartbeats cleared them.
        settled: set when the handshake is over, either way.
        ended: set when the connection is lost.
        opened: whether this side may have said something.
        reading: whether the socket is read; not while the consumer is far behind.
    """

    def __init__(self, owner: ConnectionOwner, limits: TransportLimits, dialled: PeerId | None = None) -> None:
        self.dialled = dialled
        self.peer: PeerId | None = None
        self.proven: PeerId | None = None
        self.prepare: Callable[[socket.socket], None] | None = None
        self.process: int | None = None
        self.source = ""
        self.number = 0
        self.meter: LinkMeter | None = None
        self.heard = self.spoke = self.is_waited_for = True
        self.refusal: Refusal | None = None
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self._owner = owner
        self._limits = limits
        self._transport: Stream | None = None
        self._handshake: HandshakeDecoder | None = HandshakeDecoder()
        self._frames: FrameDecoder | None = None
        self._is_within_long = False
        self._queue = SendQueue(piece_bytes=limits.piece_bytes, control_bytes=limits.control_batch_bytes)
        self._uplink: Uplink | None = None
        self._written: Urgency | None = None
        self._next_turn: asyncio.Handle | None = None
        self._is_gathering = False
        self._empty = anyio.Event()
        self._empty.set()
        self.reading = True
        self.opened = False
        self._is_over = False
        self._reason: str | None = None

    @property
    def closing(self) -> bool:
        """Whether the connection takes no more frames."""
        return self._reason is not None or self._transport is None or self._transport.is_closing()

    @property
    def reason(self) -> str:
        """Why the connection ended, as far as is known."""
        return self._reason or "unknown"

    @property
    def queued_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        if self._transport is None or self._is_over:
            return 0
        return self._queue.queued_bytes + self._transport.get_write_buffer_size()

    @property
    def message_bytes(self) -> int:
        """Of memory that frames take which wait for their turn, without their tensors."""
        return 0 if self._is_over else self._queue.message_bytes

    @property
    def socket(self) -> socket.socket:
        """The connected socket, for its options."""
        if self._transport is None:
            raise InvariantViolation("a connection was asked for its socket before it had one")
        return self._transport.get_extra_info("socket")

    def say(self, said: Hello | Refusal) -> None:
        """Send a handshake message."""
        if self._transport is not None and not self.closing:
            self._transport.writelines([encode_handshake(said)])

    def leave_by(self, uplink: Uplink) -> None:
        """Hold frames of the bulk class back as the uplink says; to be called before the connection stands."""
        piece_bytes = min(self._limits.piece_bytes, uplink.piece_bytes)
        self._uplink = uplink
        self._queue = SendQueue(piece_bytes=piece_bytes, control_bytes=self._limits.control_batch_bytes)

    def accept(self, peer: PeerId, number: int, meter: LinkMeter, *, is_waited_for: bool = True) -> None:
        """Take the peer's Hello as good: from now on frames are read, and measured."""
        self.peer, self.number, self.meter, self.is_waited_for = peer, number, meter, is_waited_for
        meter.connected()
        self._frames, self._handshake = FrameDecoder(self._limits.wire, self._owner.allocate), None
        self.settled.set()

    def send_at_once(self, frame: EncodedFrame) -> bool:
        """Hand a control frame to the stream if nothing is before it; return whether that was so.

        That is the usual case, and the one in which time counts.
        """
        stream = self._transport
        if frame.is_bulk or frame.is_gathered or stream is None or self._queue or self.closing:
            return False
        if self._uplink is not None and self._uplink.is_capped:
            return False
        if stream.get_write_buffer_size() > 0:
            return False
        self.spoke = True
        stream.writelines((frame.head,))
        return True

    def send(self, frame: EncodedFrame) -> None:
        """Send a frame when its turn comes; the memory of its tensors must not change until it is written."""
        if self.send_at_once(frame) or self.closing:
            return
        self._queue.put(frame)
        if not frame.is_gathered:
            self._write_unless_due()
            return
        self._empty_no_more()
        if not self._is_gathering:
            self._is_gathering = True
            asyncio.get_running_loop().call_soon(self._end_gathering)

    async def flushed(self) -> None:
        """Return when the socket has taken every byte, or the connection ended."""
        await self._empty.wait()

    def read_on(self, is_wanted: bool) -> None:
        """Read the socket, or let what arrives wait in it."""
        if self.reading == is_wanted:
            return
        self.reading = is_wanted
        if self.meter is not None and not is_wanted:
            self.meter.paused()
        if self._transport is None or self.closing:
            return
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def close(self, reason: str, *, flush: bool = False) -> None:
        """End the connection; `on_lost` follows with the reason. With `flush` what is queued is written first."""
        if self._is_gathering:
            # What was sent to a socket with room has left, gathered or not.
            self._write_unless_due()
        if self._reason is None:
            self._reason = reason
        if self._transport is None:
            return
        if flush:
            self._transport.close()
        else:
            self._transport.abort()

    def violated(self, error: Exception) -> None:
        """Close because the peer broke a rule, and tell it why if it is still to introduce itself."""
        if self._reason is not None:
            return
        if self._frames is None and self.dialled is None:
            self.say(Refusal(str(error)))
        self._owner.on_violation(self, error)
        self.close(str(error), flush=self._frames is None)

    # Called by the event loop, or by the TLS stream between it and this.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start on a stream without TLS."""
        # uvloop's transports are none of asyncio's classes, they only behave like them.
        if self.connected(cast("Stream", transport)):
            self.open(None)

    def connected(self, stream: Stream) -> bool:
        """Take the stream; return False, and close it, if this side has given up meanwhile or does not want it."""
        self._transport = stream
        # Zero marks: `pause_writing` and `resume_writing` then say whether anything at all is unwritten.
        stream.set_write_buffer_limits(high=0, low=0)
        if self._reason is None:
            self._owner.on_connect(self)
        else:
            stream.abort()
        return self._reason is None

    def open(self, proven: PeerId | None) -> None:
        """Start the handshake with a peer that has proven to be `proven`, if it has."""
        self.proven, self.opened = proven, True
        self._owner.on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Name the memory for the next bytes."""
        if self._frames is not None:
            return self._frames.get_buffer()
        decoder = self._handshake
        if decoder is None:
            raise InvariantViolation("a connection reads either a handshake or frames")
        return decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Decode, and hand up what is complete."""
        if self._reason is not None:
            return
        self.heard = True
        try:
            if self._frames is not None:
                frames = self._frames.advance(nbytes)
                if self.meter is not None:
                    self.meter.received(nbytes, unfinished=self._frames.mid_frame)
                for frame in frames:
                    self._owner.on_frame(self, frame)
                    if self._reason is not None:
                        return  # the consumer has ended the connection, and its loss is the last event of it
                if self._is_within_long or self._frames.is_within_long:
                    self._is_within_long = self._frames.is_within_long
                    self._owner.on_part(self, self._frames)
            elif self._handshake is not None:
                said = self._handshake.advance(nbytes)
                if isinstance(said, Refusal):
                    self.refusal = said
                if said is not None:
                    self._owner.on_handshake(self, said)
        except (RemoteProtocolError, HandshakeError) as error:
            self.violated(error)

    def pause_writing(self) -> None:
        """The socket takes no more at the moment."""
        self._empty_no_more()

    def resume_writing(self) -> None:
        """All that was handed over is written."""
        self._write_unless_due()

    def eof_received(self) -> bool:
        """The peer closed; nothing is written to one that has gone."""
        if self._reason is None:
            cut = self._frames is not None and self._frames.mid_frame
            self._reason = "connection closed by the peer" + (" within a frame" if cut else "")
        if self._transport is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end, once."""
        if self._is_over:
            return
        self._is_over = True
        self._frames = None  # with what has come of a tensor: others may still know this object
        self.ended.set()
        if self._reason is None:
            self._reason = f"connection failed: {exc}" if exc is not None else "connection closed"
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._uplink is not None:
            self._uplink.forget(self._write)
        self._empty.set()
        self.settled.set()
        self._owner.on_lost(self, self._reason)

    # Writing.

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self._write_unless_due()

    def _write_unless_due(self) -> None:
        if self._next_turn is None:
            self._write()

    def _write(self) -> None:
        """Hand batches to the stream until the socket is full, or for one turn of the event loop."""
        self._next_turn = None
        stream = self._transport
        if stream is None or self.closing:
            return
        is_held = False
        for _ in range(_BATCHES_PER_TURN):
            if not self._queue or stream.get_write_buffer_size():
                break
            urgency = self._queue.urgency
            is_held = urgency is not None and self._uplink is not None and not self._uplink.allows(self._write, urgency)
            batch = self._queue.take(with_bulk=not is_held)
            if not batch:
                break
            self.spoke = True
            self._written = None if is_held else urgency
            if self._uplink is not None:
                self._uplink.spend(sum(map(len, batch)), self._written)
            stream.writelines(batch)
        if self._uplink is not None:
            self._uplink.unsent(self._write, self._unsent(stream))
        if not self.queued_bytes:
            self._empty.set()
            return
        self._empty_no_more()
        # If the socket is full, `resume_writing` follows; if the cap is reached, it calls this again.
        if self._next_turn is None and not is_held and not stream.get_write_buffer_size():
            self._next_turn = asyncio.get_running_loop().call_soon(self._write)

    def _empty_no_more(self) -> None:
        if self._empty.is_set():
            self._empty = anyio.Event()

    def _unsent(self, stream: Stream) -> Urgency | None:
        """Of the bulk frames that the socket has not taken, the most urgent ones."""
        written = self._written if stream.get_write_buffer_size() > 0 else None
        return min((each for each in (self._queue.urgency, written) if each is not None), default=None)
