"""One connection: bytes in, frames out and back, with nothing copied on the way that is large.

    handshaking -- the peer's Hello, accepted --> framing -- close, error or end of stream --> lost

Writes go to the event loop's transport as they are. uvloop tries to write at once (one system call for all buffers)
and keeps what the socket does not take by reference: that memory stays alive, and must not change until it is written.
Reads go straight into the memory that the frame decoder names.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

import anyio

from shoal.errors import HandshakeError, InvariantViolation, RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.limits import TransportLimits
from shoal.wire.frame import Frame, FrameDecoder
from shoal.wire.handshake import HandshakeDecoder, Hello, Refusal, encode_handshake


class ConnectionOwner(Protocol):
    """Where a connection's events go. Called from within the loop's read callback: no detour, no waiting."""

    def on_open(self, connection: Connection) -> None:
        """The socket is connected; nothing has been said yet."""
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
        number: the connection's random number, from the dialler's Hello.
        settled: set when the handshake is over, either way.
        ended: set when the connection is lost.
    """

    def __init__(self, owner: ConnectionOwner, limits: TransportLimits, dialled: PeerId | None = None) -> None:
        self.dialled = dialled
        self.peer: PeerId | None = None
        self.number = 0
        self.refusal: Refusal | None = None
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self._owner = owner
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._handshake: HandshakeDecoder | None = HandshakeDecoder()
        self._frames: FrameDecoder | None = None
        self._empty = anyio.Event()
        self._empty.set()
        self._unread_bytes = 0
        self._reading = True
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
        """Whether the socket has been connected."""
        return self._transport is not None

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

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake, or drop the socket if this side has given up meanwhile."""
        # uvloop's transports are none of asyncio's classes, they only behave like them.
        self._transport = transport = cast("asyncio.Transport", transport)
        # Zero marks: `pause_writing` and `resume_writing` then say whether anything at all is unwritten.
        transport.set_write_buffer_limits(high=0, low=0)
        size = self._limits.socket_buffer_bytes
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        if self._reason is not None:
            transport.abort()
            return
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
            if self._frames is None and self.dialled is None:
                self.say(Refusal(str(error)))
            self._owner.on_violation(self, error)
            self.close(str(error), flush=self._frames is None)

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
