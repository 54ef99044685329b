"""From the bytes of one connection to frames, without I/O.

    header --> body --> piece --> (control frames, piece header --> piece) ... --> frame

A decoder asks for bytes and says where they go (`get_buffer`), and is told how many came (`advance`). Small frames pass
through a read-ahead buffer, many at a time; the bytes of a tensor go straight into the memory that is handed up.
Between two pieces no more is asked for than the next header or body, so that nothing of a piece is read ahead and
copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.wire.frame import (
    FRAME_VERSION,
    HEADER,
    MAGIC,
    MIN_PIECE_BYTES,
    PIECE_HEADER,
    PIECE_MAGIC,
    TRAFFIC_ORDER,
    Body,
    Frame,
    is_bulk,
)
from shoal.wire.limits import NO_TENSORS, TENSORS_OF, WireLimits
from shoal.wire.messages import Traffic
from shoal.wire.tensors import WireTensor, empty_bytes, tensor_bytes

READ_AHEAD_BYTES: Final = 64 * 1024
"""Longest body that is decoded in the read-ahead buffer; a tensor's first bytes in it are copied once."""

_MAX_TENSORS: Final = max(counts.stop - 1 for counts in TENSORS_OF.values())
_DECODER: Final = msgspec.msgpack.Decoder(Body)


class _Header(msgspec.Struct, frozen=True):
    traffic: Traffic
    num_tensors: int
    body_bytes: int
    payload_bytes: int
    piece_bytes: int


class _Incomplete:
    """A bulk frame whose payload is not all here."""

    __slots__ = ("body", "filled", "header", "left_bytes", "piece_left_bytes", "target", "tensors")

    def __init__(self, header: _Header, body: Body) -> None:
        self.header = header
        self.body = body
        self.tensors: list[WireTensor] = []
        self.target = memoryview(b"")  # memory of the tensor that is being received, filled up to `filled`
        self.filled = 0
        self.left_bytes = header.payload_bytes
        self.piece_left_bytes = header.piece_bytes


class FrameDecoder:
    """Turns the bytes of one connection into frames.

    After an error the decoder is of no further use: the connection has to be closed.
    """

    def __init__(self, limits: WireLimits | None = None, allocate: Callable[[int], memoryview] = empty_bytes) -> None:
        """Start before the first byte.

        Args:
            allocate: returns writable memory of this size (bytes) for a tensor; the frame's receiver then owns it.
        """
        self._limits = limits or WireLimits()
        self._max_body_bytes = self._limits.max_body_bytes
        self._allocate = allocate
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._start = 0  # unread bytes in `_ahead` are [_start, _stop)
        self._stop = 0
        self._header: _Header | None = None  # of the frame whose body comes next
        self._long_body: memoryview | None = None  # one that the read-ahead buffer is too short for, so far filled to
        self._long_filled = 0
        self._incomplete: _Incomplete | None = None
        self._frames: list[Frame] = []

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end within a frame."""
        return self._start < self._stop or self._header is not None or self._incomplete is not None

    @property
    def is_within_long(self) -> bool:
        """Whether there is memory for a part of a frame that is not all here: a tensor, or a long body."""
        return self._incomplete is not None or self._long_body is not None

    @property
    def filled_bytes(self) -> int:
        """Of that memory, what has come."""
        incomplete = self._incomplete
        payload_bytes = 0 if incomplete is None else incomplete.header.payload_bytes - incomplete.left_bytes
        return payload_bytes + (0 if self._long_body is None else self._long_filled)

    @property
    def unfilled_bytes(self) -> int:
        """Of the memory of a tensor, what has not come."""
        return 0 if self._incomplete is None else len(self._incomplete.target) - self._incomplete.filled

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go: never empty, valid until `advance`."""
        if self._long_body is not None:
            return self._long_body[self._long_filled :]
        incomplete = self._incomplete
        if incomplete is None:
            return self._ahead[self._stop :] if self._stop else self._ahead
        if incomplete.piece_left_bytes:
            return incomplete.target[incomplete.filled : incomplete.filled + incomplete.piece_left_bytes]
        return self._ahead[self._stop : self._start + self._wanted_bytes()]

    def advance(self, num_bytes: int) -> list[Frame]:
        """Take note that `num_bytes` bytes were written to the start of the last `get_buffer`.

        Returns:
            The frames that are now complete, in order.

        Raises:
            RemoteProtocolError: the bytes are no frame, or a frame that breaks a limit.
        """
        if self._long_body is not None:
            self._long_filled += num_bytes
        elif self._incomplete is not None and self._incomplete.piece_left_bytes:
            self._filled(self._incomplete, num_bytes)
        else:
            self._stop += num_bytes
        while self._next_part():
            pass
        if self._start:
            self._compact()
        frames, self._frames = self._frames, []
        return frames

    def _next_part(self) -> bool:
        """Complete one part (a header and its body, a piece); return False if bytes are missing."""
        if self._header is not None:
            return self._take_body(self._header)
        if self._start == self._stop:
            return False
        incomplete = self._incomplete
        if incomplete is not None and incomplete.piece_left_bytes:
            return self._take_payload(incomplete)
        if self._stop - self._start < self._wanted_bytes():
            return False
        if incomplete is not None and self._is_piece_next():
            self._take_piece_header(incomplete)
            return True
        return self._take_header(incomplete)

    def _wanted_bytes(self) -> int:
        """Return how many unread bytes the next header or short body needs; both headers begin with a magic."""
        if self._header is not None:
            return self._header.body_bytes
        if self._incomplete is None:
            return HEADER.size
        if self._stop - self._start < PIECE_HEADER.size:
            return PIECE_HEADER.size
        return PIECE_HEADER.size if self._is_piece_next() else HEADER.size

    def _is_piece_next(self) -> bool:
        return self._ahead[self._start : self._start + len(PIECE_MAGIC)].tobytes() == PIECE_MAGIC

    def _take_piece_header(self, incomplete: _Incomplete) -> None:
        _, piece_bytes = PIECE_HEADER.unpack_from(self._ahead, self._start)
        if not min(MIN_PIECE_BYTES, incomplete.left_bytes) <= piece_bytes <= incomplete.left_bytes:
            raise RemoteProtocolError(f"a piece of {piece_bytes} bytes, {incomplete.left_bytes} are left of the frame")
        self._start += PIECE_HEADER.size
        incomplete.piece_left_bytes = piece_bytes

    def _take_header(self, incomplete: _Incomplete | None) -> bool:
        magic, version, traffic, num_tensors, body_bytes, payload_bytes, piece_bytes = HEADER.unpack_from(
            self._ahead, self._start
        )
        if magic != MAGIC:
            raise RemoteProtocolError(f"frame starts with {magic!r} instead of {MAGIC!r}")
        if version != FRAME_VERSION:
            raise RemoteProtocolError(f"frame version {version}, this side speaks {FRAME_VERSION}")
        if traffic >= len(TRAFFIC_ORDER):
            raise RemoteProtocolError(f"unknown kind of traffic {traffic}")
        if body_bytes > self._max_body_bytes:
            raise RemoteProtocolError(f"body of {body_bytes} bytes, limit {self._max_body_bytes}")
        if num_tensors > _MAX_TENSORS or payload_bytes > num_tensors * self._limits.max_tensor_bytes:
            raise RemoteProtocolError(f"{num_tensors} tensors of {payload_bytes} bytes together")
        if piece_bytes > payload_bytes:
            raise RemoteProtocolError(f"a first piece of {piece_bytes} bytes, of {payload_bytes} in all")
        header = _Header(TRAFFIC_ORDER[int(traffic)], num_tensors, body_bytes, payload_bytes, piece_bytes)
        if incomplete is not None and is_bulk(header.traffic, num_tensors):
            raise RemoteProtocolError(f"a frame of {header.traffic} with {num_tensors} tensors within another one")
        self._start += HEADER.size
        self._header = header
        return self._take_body(header)

    def _take_body(self, header: _Header) -> bool:
        raw = self._body_bytes(header.body_bytes)
        if raw is None:
            return False
        try:
            body = _DECODER.decode(raw)
        except MALFORMED as error:
            raise RemoteProtocolError(f"body of {header.body_bytes} bytes fits no message: {error}") from error
        self._check(header, body)
        self._header = None
        if header.num_tensors:
            self._incomplete = _Incomplete(header, body)
            self._next_tensor(self._incomplete)
        else:
            self._frames.append(Frame(body.message, (), header.traffic, HEADER.size + header.body_bytes))
        return True

    def _check(self, header: _Header, body: Body) -> None:
        """Compare a body with its header and with the limits, before a byte is allocated for its tensors."""
        kind = type(body.message)
        limit = self._limits.body_bytes_of(kind)
        if header.body_bytes > limit:
            raise RemoteProtocolError(f"{kind.__name__} of {header.body_bytes} bytes, limit {limit}")
        if len(body.tensors) != header.num_tensors or header.num_tensors not in TENSORS_OF.get(kind, NO_TENSORS):
            raise RemoteProtocolError(f"{kind.__name__} with {len(body.tensors)} tensors")
        if not body.tensors and not header.payload_bytes:
            return
        sizes = [tensor_bytes(t.dtype, t.shape) for t in body.tensors]
        if sum(sizes) != header.payload_bytes:
            raise RemoteProtocolError(
                f"{kind.__name__}: tensors of {sum(sizes)} bytes, the header says {header.payload_bytes}"
            )
        if any(size > self._limits.max_tensor_bytes for size in sizes):
            limit = self._limits.max_tensor_bytes
            raise RemoteProtocolError(f"{kind.__name__}: tensor of {max(sizes)} bytes, limit {limit}")

    def _body_bytes(self, num_bytes: int) -> memoryview | None:
        """Return the next `num_bytes` bytes (short ones valid until more come), or None if they are not all here."""
        if num_bytes <= READ_AHEAD_BYTES:
            if self._stop - self._start < num_bytes:
                return None
            raw = self._ahead[self._start : self._start + num_bytes]
            self._start += num_bytes
            return raw
        if self._long_body is None:
            self._long_body, self._long_filled = empty_bytes(num_bytes), self._stop - self._start
            self._long_body[: self._long_filled] = self._ahead[self._start : self._stop]
            self._start = self._stop
        if self._long_filled < num_bytes:
            return None
        raw, self._long_body = self._long_body, None
        return raw

    def _take_payload(self, incomplete: _Incomplete) -> bool:
        """Move what was read ahead of the payload to where it belongs."""
        room = min(len(incomplete.target) - incomplete.filled, incomplete.piece_left_bytes)
        num_bytes = min(room, self._stop - self._start)
        if not num_bytes:
            return False
        filled = incomplete.filled
        incomplete.target[filled : filled + num_bytes] = self._ahead[self._start : self._start + num_bytes]
        self._start += num_bytes
        self._filled(incomplete, num_bytes)
        return True

    def _filled(self, incomplete: _Incomplete, num_bytes: int) -> None:
        """Take note of bytes that are where they belong."""
        incomplete.filled += num_bytes
        incomplete.left_bytes -= num_bytes
        incomplete.piece_left_bytes -= num_bytes
        if incomplete.filled == len(incomplete.target):
            spec = incomplete.body.tensors[len(incomplete.tensors)]
            incomplete.tensors.append(WireTensor(spec.dtype, spec.shape, incomplete.target))
            self._next_tensor(incomplete)

    def _next_tensor(self, incomplete: _Incomplete) -> None:
        """Make room for the next tensor that has bytes; if there is none, the frame is complete."""
        header, body, tensors = incomplete.header, incomplete.body, incomplete.tensors
        while len(tensors) < len(body.tensors):
            spec = body.tensors[len(tensors)]
            num_bytes = tensor_bytes(spec.dtype, spec.shape)
            incomplete.target, incomplete.filled = self._allocate(num_bytes), 0
            if num_bytes:
                return
            tensors.append(WireTensor(spec.dtype, spec.shape, incomplete.target))
        num_bytes = HEADER.size + header.body_bytes + header.payload_bytes
        self._frames.append(Frame(body.message, tuple(tensors), header.traffic, num_bytes))
        self._incomplete = None

    def _compact(self) -> None:
        """Move what is unread to the front, so that the part it belongs to fits."""
        if self._start == self._stop:
            self._start = self._stop = 0
        else:
            unread = self._stop - self._start
            self._ahead[:unread] = self._ahead[self._start : self._stop]
            self._start, self._stop = 0, unread
