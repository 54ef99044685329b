"""TLS between a socket and a connection: the standard library's engine, fed from memory, without waiting.

    socket -- event loop --> TlsStream (records) -- plain bytes --> Connection --> decoders
                    connect --> TLS handshake --> established --> closed

The event loops can do TLS themselves, but tell a server nothing of a handshake that failed or drags on: here it is
counted, explained and limited in time. It also bounds the encrypted copy of what is being sent: tensors are encrypted
piece by piece as the socket takes them, and received records are decrypted straight into the decoder's memory.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, cast

from shoal.clock import SystemClock, thread_cpu_s
from shoal.errors import HandshakeError, InvariantViolation
from shoal.transport.connection import Connection, Stream
from shoal.transport.rests import Pace, Rests
from shoal.transport.tls import explained, peer_of

_READ_BYTES: Final = 256 * 1024
_HANDSHAKE_BYTES: Final = 4 * 1024
"""Read at a time from who may be a stranger: what he makes this side hold is to be little."""
_FEW_BYTES: Final = 16 * 1024
"""Read at a time of whom it is not known that his bytes are read fast: there may be hundreds of them in one turn."""
_MEASURED_BYTES: Final = 2 * 1024
"""With fewer, no reading takes long."""
_PIECE_BYTES: Final = 256 * 1024
_SLOW_S: Final = 0.02
"""Of computing for `_READ_BYTES`: small messages take that and more, tensors a hundredth. Who sends so rests as `Pace`
says, so that half of the loop's time is left for others."""
# A fast socket would otherwise keep the event loop encrypting until a large tensor is gone.
_BYTES_PER_TURN: Final = 2 * 1024 * 1024


class TlsStream(asyncio.BufferedProtocol):
    """The protocol object of one socket, and the stream of the connection above."""

    def __init__(self, connection: Connection, context: ssl.SSLContext, rests: Rests, *, server_side: bool) -> None:
        self._connection = connection
        self._clock = SystemClock()
        self._pace = Pace(rests, self._clock.now_s())
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._transport: Stream | None = None
        self._read_buffer = memoryview(bytearray(_HANDSHAKE_BYTES))
        self._established = False
        self._is_fast = False
        self._reading = True
        self._rest: asyncio.Handle | None = None
        self._is_resting = False
        self._backlog: deque[memoryview] = deque()  # plain bytes, not encrypted yet
        self._backlog_bytes = 0
        self._socket_full = False
        self._connection_paused = False
        self._next_turn: asyncio.Handle | None = None
        self._closing = False

    # The stream of the connection.

    def writelines(self, list_of_data: Sequence[bytes | bytearray | memoryview], /) -> None:
        """Send bytes; before TLS is established nothing is said, so they are dropped."""
        if not self._established or self._closing:
            return
        for data in list_of_data:
            if len(data):
                self._backlog.append(memoryview(data))
                self._backlog_bytes += len(data)
        if self._next_turn is None:
            self._write()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the socket has not taken yet."""
        return self._backlog_bytes + self._lower.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits of the socket's own buffer."""
        self._lower.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        """Decrypt no more for the time being."""
        self._reading = False
        self._lower.pause_reading()

    def resume_reading(self) -> None:
        """Go on, first with what has been received already."""
        self._reading = True
        if self._rest is None:
            self._lower.resume_reading()
        # Not at once: the connection may be in the middle of something.
        asyncio.get_running_loop().call_soon(self._read)

    def is_closing(self) -> bool:
        """Whether no more can be sent."""
        return self._closing or self._lower.is_closing()

    def close(self) -> None:
        """Close once everything is written."""
        self._closing = True
        if not self._backlog:
            self._say_goodbye()

    def abort(self) -> None:
        """Close now."""
        self._closing = True
        self._drop_backlog()
        self._lower.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Ask the socket's transport."""
        return self._lower.get_extra_info(name, default)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start TLS, if the connection is wanted."""
        self._transport = cast("Stream", transport)
        if self._connection.connected(self):
            self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Name the memory for the next records."""
        return self._read_buffer if self._is_fast else self._read_buffer[:_FEW_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Take records."""
        if self._closing:
            return
        is_full, is_peer = nbytes == len(self.get_buffer(-1)), self._established
        if nbytes < _MEASURED_BYTES and not is_full:
            self._take(nbytes)
            return
        begun_s = thread_cpu_s()
        self._take(nbytes)
        took_s = thread_cpu_s() - begun_s
        if self._rest is not None or self.is_closing():
            return
        # A handshake takes long by itself.
        is_slow = is_peer and took_s >= _SLOW_S * nbytes / _READ_BYTES
        rest_s = self._pace.begin(took_s, self._clock.now_s()) if is_slow else 0.0
        self._is_resting = rest_s > 0.0
        self._is_fast = is_peer and not self._is_resting and (self._is_fast or not is_slow)
        if is_full or self._is_resting:
            # The loop would read on up to 32 times: of small messages that is seconds in which nobody else is heard.
            self._lower.pause_reading()
            self._rest = asyncio.get_running_loop().call_later(rest_s, self._read_again)

    def _take(self, nbytes: int) -> None:
        self._incoming.write(self._read_buffer[:nbytes])
        if self._established or self._shake_hands():
            self._read()

    def _read_again(self) -> None:
        """Go on after a turn of the loop, or some, in which the others had theirs."""
        self._rest = None
        self._end_rest()
        if self._reading and not self.is_closing():
            self._lower.resume_reading()

    def _end_rest(self) -> None:
        if self._is_resting:
            self._is_resting = False
            self._pace.end()

    def pause_writing(self) -> None:
        """The socket takes no more at the moment."""
        self._socket_full = True

    def resume_writing(self) -> None:
        """The socket has taken everything."""
        self._socket_full = False
        if self._next_turn is None:
            self._write()

    def eof_received(self) -> bool:
        """The peer closed, or its host did."""
        self._connection.eof_received()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed."""
        self._closing = True
        if self._rest is not None:
            self._rest.cancel()
        self._end_rest()
        self._drop_backlog()
        self._connection.connection_lost(exc)

    # TLS.

    @property
    def _lower(self) -> Stream:
        if self._transport is None:
            raise InvariantViolation("a TLS stream was used before it was connected")
        return self._transport

    def _shake_hands(self) -> bool:
        """Take the next step of the TLS handshake; return whether it is complete and the connection open."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._flush()  # the alert that tells the other side
            self._connection.violated(explained(error))
            return False
        self._flush()
        try:
            proven = peer_of(self._tls.getpeercert(binary_form=True))
        except HandshakeError as error:
            self._connection.violated(error)
            return False
        self._established = True
        self._read_buffer = memoryview(bytearray(_READ_BYTES))
        self._connection.open(proven)
        return not self._closing

    def _read(self) -> None:
        """Hand up what can be decrypted."""
        more = True
        while more and self._established and self._reading and not self._closing:
            target = self._connection.get_buffer(-1)
            filled = 0
            ended = False
            failure: ssl.SSLError | None = None
            try:
                while filled < len(target) and not ended:
                    # Given memory, it returns how many bytes it wrote there; the stubs only know the other form.
                    num_bytes = cast("int", self._tls.read(len(target) - filled, target[filled:]))
                    filled += num_bytes
                    ended = num_bytes == 0
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError) as error:
                more, ended = False, isinstance(error, ssl.SSLZeroReturnError)
            except ssl.SSLError as error:
                failure = error
            if filled:
                self._connection.buffer_updated(filled)
            if failure is not None:
                self._fail(failure)
                return
            if ended:
                self._connection.eof_received()
                return
        if not self._closing and self._outgoing.pending:
            self._flush()  # TLS itself has something to say, such as a change of keys

    def _fail(self, error: ssl.SSLError) -> None:
        """Close after the other side broke TLS, or refused this side after its own half of the handshake."""
        if self._closing:
            return
        told = "alert" in (error.reason or "").lower()
        if told and self._connection.dialled is not None:
            self._connection.close(f"refused by the peer: {explained(error)}")
        else:
            self._connection.violated(explained(error))

    def _write(self) -> None:
        """Encrypt and send until the socket is full, or for one turn of the event loop."""
        self._next_turn = None
        left_bytes = _BYTES_PER_TURN
        try:
            while self._backlog and not self._socket_full and left_bytes > 0 and not self._lower.is_closing():
                left_bytes -= self._encrypt()
                self._flush()
        except ssl.SSLError as error:
            self._fail(error)
            return
        if self._lower.is_closing():
            self._drop_backlog()
        elif self._backlog and not self._socket_full:
            self._next_turn = asyncio.get_running_loop().call_soon(self._write)
        self._tell_connection()
        if self._closing and not self._backlog:
            self._say_goodbye()

    def _encrypt(self) -> int:
        """Encrypt up to `_PIECE_BYTES`, small buffers together; return how many."""
        num_bytes = 0
        while self._backlog and num_bytes < _PIECE_BYTES:
            head = self._backlog[0]
            written = self._tls.write(head[: _PIECE_BYTES - num_bytes])
            num_bytes += written
            self._backlog_bytes -= written
            if written == len(head):
                self._backlog.popleft()
            else:
                self._backlog[0] = head[written:]
        return num_bytes

    def _flush(self) -> None:
        records = self._outgoing.read()
        if records and not self._lower.is_closing():
            self._lower.writelines([records])

    def _tell_connection(self) -> None:
        """Keep the connection's view (is anything at all unwritten?) in step."""
        unwritten = bool(self._backlog) or self._socket_full
        if unwritten and not self._connection_paused:
            self._connection_paused = True
            self._connection.pause_writing()
        elif not unwritten and self._connection_paused:
            self._connection_paused = False
            self._connection.resume_writing()

    def _say_goodbye(self) -> None:
        if self._established:
            with suppress(ssl.SSLError):  # it wants the other side's goodbye, which nobody waits for
                self._tls.unwrap()
            self._flush()
        self._lower.close()

    def _drop_backlog(self) -> None:
        self._backlog.clear()
        self._backlog_bytes = 0
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
