"""One connection: bytes in, frames out and back, with nothing copied on the way that is large.

    connected -- (TLS) --> handshaking -- the peer's Hello, accepted --> framing -- close, error, end --> lost

Without TLS the event loop's transport is the connection's stream; with it, a `TlsStream` is (`tls_stream.py`). Writes
to a Unix socket go out as they are: uvloop tries to write at once (one system call for all buffers) and keeps what the
socket does not take by reference: that memory stays alive, and must not change until it is written. Reads go straight
into the memory that the frame decoder names.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import anyio

from shoal.errors import HandshakeError, InvariantViolation, RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.limits import TransportLimits
from shoal.wire.frame import Frame, FrameDecoder
from shoal.wire.handshake import HandshakeDecoder, Hello, Refusal, encode_handshake


class Stream(Protocol):
    """What a connection needs of its transport; the methods are those of `asyncio.Transport`."""

    def writelines(self, list_of_data: Sequence[bytes | bytearray | memoryview], /) -> None: ...
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

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """A frame is complete."""
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
        dialled: the peer that this side meant to reach, or None if the other side dialled.
        peer: who is at the other end, once `accept` was called.
        proven: who is at the other end by its certificate; None where there is no TLS.
        prepare: sets the socket's options and checks what the kernel knows of the other end; the carrier's.
        source: host that a TCP connection comes from; empty for a Unix socket.
        number: the connection's random number, from the dialler's Hello.
        heard, spoke: whether anything was received or sent since whoever watches over the connection cleared them.
        settled: set when the handshake is over, either way.
        ended: set when the connection is lost.
    """

    def __init__(self, owner: ConnectionOwner, limits: TransportLimits, dialled: PeerId | None = None) -> None:
        self.dialled = dialled
        self.peer: PeerId | None = None
        self.proven: PeerId | None = None
        self.prepare: Callable[[socket.socket], None] | None = None
        self.source = ""
        self.number = 0
        self.heard = self.spoke = True
        self.refusal: Refusal | None = None
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self._owner = owner
        self._limits = limits
        self._transport: Stream | None = None
        self._handshake: HandshakeDecoder | None = HandshakeDecoder()
        self._frames: FrameDecoder | None = None
        self._empty = anyio.Event()
        self._empty.set()
        self._unread_bytes = 0
        self._reading = True
        self._opened = False
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
    def opened(self) -> bool:
        """Whether this side may have said something."""
        return self._opened

    @property
    def reading(self) -> bool:
        """Whether the socket is read; not while the consumer is far behind."""
        return self._reading

    @property
    def queued_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None or self.ended.is_set() else self._transport.get_write_buffer_size()

    @property
    def socket(self) -> socket.socket:
        """The connected socket, for its options."""
        if self._transport is None:
            raise InvariantViolation("a connection was asked for its socket before it had one")
        return self._transport.get_extra_info("socket")

    def say(self, said: Hello | Refusal) -> None:
        """Send a handshake message."""
        self.send([encode_handshake(said)])

    def accept(self, peer: PeerId, number: int) -> None:
        """Take the peer's Hello as good: from now on frames are read."""
        self.peer, self.number = peer, number
        self._frames, self._handshake = FrameDecoder(self._limits.wire), None
        self.settled.set()

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write buffers one after the other; their memory must not change until they are written."""
        if self._transport is not None and not self.closing:
            self.spoke = True
            self._transport.writelines(buffers)

    async def flushed(self) -> None:
        """Return when the socket has taken every byte, or the connection ended."""
        await self._empty.wait()

    def taken(self, num_bytes: int) -> None:
        """Take note that the consumer took a frame of this many bytes."""
        self._unread_bytes -= num_bytes
        if not self._reading and self._unread_bytes * 2 <= self._limits.max_unread_bytes:
            self._reading = True
            if self._transport is not None and not self.closing:
                self._transport.resume_reading()

    def close(self, reason: str, *, flush: bool = False) -> None:
        """End the connection; `on_lost` follows with the reason. With `flush` what is queued is written first."""
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
        self.proven, self._opened = proven, True
        self._owner.on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Name the memory for the next bytes."""
        decoder = self._frames or self._handshake
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
                for frame in self._frames.advance(nbytes):
                    self._owner.on_frame(self, frame)
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
        self._empty = anyio.Event()

    def resume_writing(self) -> None:
        """All is written."""
        self._empty.set()

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
        if self.ended.is_set():
            return
        self.ended.set()
        if self._reason is None:
            self._reason = f"connection failed: {exc}" if exc is not None else "connection closed"
        self._empty.set()
        self.settled.set()
        self._owner.on_lost(self, self._reason)

    def unread(self, num_bytes: int) -> partial[None]:
        """Count received bytes until the returned callback is called; stop reading while they are too many."""
        self._unread_bytes += num_bytes
        if self._reading and self._unread_bytes > self._limits.max_unread_bytes:
            self._reading = False
            if self._transport is not None:
                self._transport.pause_reading()
        return partial(self.taken, num_bytes)
