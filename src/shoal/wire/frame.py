"""Frames: a fixed header, one encoded message, and the bytes of its tensors; both directions, without I/O.

    offset  size  field (little-endian)
    0       4     magic "SHOL"
    4       1     frame version
    5       1     kind of traffic, an index into `TRAFFIC_ORDER`
    6       2     number of tensors
    8       4     length of the body in bytes
    12      8     length of all tensors together in bytes
    20      ...   body: msgpack of [message, [[dtype, shape], ...]]
    ...     ...   the tensors' bytes, one after the other

A decoder asks for bytes and says where they go (`get_buffer`), and is told how many came (`advance`). Small frames pass
through a read-ahead buffer, many at a time; the bytes of a tensor go straight into the memory that is handed up.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from shoal.errors import LocalProtocolError, RemoteProtocolError
from shoal.wire.limits import TENSORS_OF, WireLimits
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.base import Struct
from shoal.wire.tensors import MAX_DIMENSIONS, WireTensor, empty_bytes, tensor_bytes

MAGIC: Final = b"SHOL"
FRAME_VERSION: Final = 1
HEADER: Final = struct.Struct("<4sBBHIQ")
TRAFFIC_ORDER: Final[tuple[Traffic, ...]] = tuple(Traffic)

READ_AHEAD_BYTES: Final = 64 * 1024
"""Longest body that is decoded in the read-ahead buffer; a tensor's first bytes in it are copied once."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Dtype = Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]


class _TensorHeader(Struct, frozen=True):
    """Type and shape of a tensor whose bytes follow."""

    dtype: _Dtype
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class _Body(Struct, frozen=True):
    """What a frame's body decodes to."""

    message: Message
    tensors: tuple[_TensorHeader, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame; `num_bytes` is its whole length on the wire."""

    message: Message
    tensors: tuple[WireTensor, ...]
    traffic: Traffic
    num_bytes: int


def encode_frame(
    message: Message,
    tensors: Sequence[WireTensor] = (),
    traffic: Traffic = Traffic.CONTROL,
    limits: WireLimits | None = None,
) -> list[bytearray | memoryview]:
    """Encode a frame as the buffers to be written one after the other.

    The tensors' own memory is returned, not a copy: it must stay unchanged until it is written.

    Args:
        message: what to say.
        tensors: as many as the message's type carries (`TENSORS_OF`).
        traffic: what the receiver counts the bytes as.
        limits: what the receiver accepts; the defaults if None.

    Raises:
        LocalProtocolError: the frame would break a limit, so the receiver would close the connection.
    """
    limits = limits or WireLimits()
    name = type(message).__name__
    expected = TENSORS_OF.get(type(message), 0)
    if len(tensors) != expected:
        raise LocalProtocolError(f"{name} carries {expected} tensors, not {len(tensors)}")
    for tensor in tensors:
        if tensor.num_bytes > limits.max_tensor_bytes:
            raise LocalProtocolError(
                f"{name}: a tensor of {tensor.num_bytes} bytes is above the limit of {limits.max_tensor_bytes}"
            )
    out = bytearray(HEADER.size)
    _ENCODER.encode_into((message, [(t.dtype, t.shape) for t in tensors]), out, HEADER.size)
    body_bytes = len(out) - HEADER.size
    if body_bytes > limits.body_bytes_of(type(message)):
        raise LocalProtocolError(
            f"{name} of {body_bytes} bytes is above the limit of {limits.body_bytes_of(type(message))}"
        )
    payload_bytes = sum(t.num_bytes for t in tensors)
    traffic_index = TRAFFIC_ORDER.index(traffic)
    HEADER.pack_into(out, 0, MAGIC, FRAME_VERSION, traffic_index, len(tensors), body_bytes, payload_bytes)
    return [out, *(t.data for t in tensors if t.num_bytes)]


class FrameDecoder:
    """Turns the bytes of one connection into frames.

    After an error the decoder is of no further use: the connection has to be closed.
    """

    def __init__(self, limits: WireLimits | None = None) -> None:
        self._limits = limits or WireLimits()
        self._ahead = memoryview(bytearray(READ_AHEAD_BYTES))
        self._start = 0  # unread bytes in `_ahead` are [_start, _stop)
        self._stop = 0
        self._header: tuple[Traffic, int, int, int] | None = None
        self._body: _Body | None = None
        self._tensors: list[WireTensor] = []
        # A long body or a tensor is received into memory of its own: `_target`, filled up to `_filled`.
        self._target: memoryview | None = None
        self._filled = 0
        self._frames: list[Frame] = []

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end within a frame."""
        return self._start < self._stop or self._header is not None

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go: never empty, valid until `advance`."""
        if self._target is not None:
            return self._target[self._filled :]
        return self._ahead[self._stop :]

    def advance(self, num_bytes: int) -> list[Frame]:
        """Take note that `num_bytes` bytes were written to the start of the last `get_buffer`.

        Returns:
            The frames that are now complete, in order.

        Raises:
            RemoteProtocolError: the bytes are no frame, or one that breaks a limit.
        """
        if self._target is not None:
            self._filled += num_bytes
        else:
            self._stop += num_bytes
        while self._next_part():
            pass
        self._compact()
        frames, self._frames = self._frames, []
        return frames

    def _next_part(self) -> bool:
        """Complete one part (header, body, or one tensor); return False if bytes are missing."""
        if self._header is None:
            return self._take_header()
        if self._body is None:
            return self._take_body(self._header)
        return self._take_tensor(self._header, self._body)

    def _take_header(self) -> bool:
        if self._stop - self._start < HEADER.size:
            return False
        magic, version, traffic, num_tensors, body_bytes, payload_bytes = HEADER.unpack_from(self._ahead, self._start)
        if magic != MAGIC:
            raise RemoteProtocolError(f"frame starts with {magic!r} instead of {MAGIC!r}")
        if version != FRAME_VERSION:
            raise RemoteProtocolError(f"frame version {version}, this side speaks {FRAME_VERSION}")
        if traffic >= len(TRAFFIC_ORDER):
            raise RemoteProtocolError(f"unknown kind of traffic {traffic}")
        if body_bytes > self._limits.max_body_bytes:
            raise RemoteProtocolError(f"body of {body_bytes} bytes, limit {self._limits.max_body_bytes}")
        max_payload_bytes = num_tensors * self._limits.max_tensor_bytes
        if num_tensors > max(TENSORS_OF.values()) or payload_bytes > max_payload_bytes:
            raise RemoteProtocolError(f"{num_tensors} tensors of {payload_bytes} bytes together")
        self._start += HEADER.size
        self._header = (TRAFFIC_ORDER[traffic], num_tensors, body_bytes, payload_bytes)
        return True

    def _take_body(self, header: tuple[Traffic, int, int, int]) -> bool:
        _, num_tensors, body_bytes, payload_bytes = header
        raw = self._take(body_bytes, in_place=body_bytes <= READ_AHEAD_BYTES)
        if raw is None:
            return False
        try:
            body = _DECODER.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"body of {body_bytes} bytes fits no message: {error}") from error
        name = type(body.message).__name__
        if body_bytes > self._limits.body_bytes_of(type(body.message)):
            limit = self._limits.body_bytes_of(type(body.message))
            raise RemoteProtocolError(f"{name} of {body_bytes} bytes, limit {limit}")
        if not len(body.tensors) == num_tensors == TENSORS_OF.get(type(body.message), 0):
            raise RemoteProtocolError(f"{name} with {len(body.tensors)} tensors")
        sizes = [tensor_bytes(t.dtype, t.shape) for t in body.tensors]
        if sum(sizes) != payload_bytes:
            raise RemoteProtocolError(f"{name}: tensors of {sum(sizes)} bytes, the header says {payload_bytes}")
        if any(size > self._limits.max_tensor_bytes for size in sizes):
            raise RemoteProtocolError(f"{name}: tensor of {max(sizes)} bytes, limit {self._limits.max_tensor_bytes}")
        self._body = body
        return True

    def _take_tensor(self, header: tuple[Traffic, int, int, int], body: _Body) -> bool:
        if len(self._tensors) < len(body.tensors):
            spec = body.tensors[len(self._tensors)]
            data = self._take(tensor_bytes(spec.dtype, spec.shape), in_place=False)
            if data is None:
                return False
            self._tensors.append(WireTensor(spec.dtype, spec.shape, data))
            return True
        traffic, _, body_bytes, payload_bytes = header
        num_bytes = HEADER.size + body_bytes + payload_bytes
        self._frames.append(Frame(body.message, tuple(self._tensors), traffic, num_bytes))
        self._header, self._body, self._tensors = None, None, []
        return True

    def _take(self, num_bytes: int, *, in_place: bool) -> memoryview | None:
        """Return the next `num_bytes` bytes (in place: valid until more come), or None if they are not all here."""
        if self._target is None:
            if in_place:
                if self._stop - self._start < num_bytes:
                    return None
                raw = self._ahead[self._start : self._start + num_bytes]
                self._start += num_bytes
                return raw
            self._target, self._filled = empty_bytes(num_bytes), min(num_bytes, self._stop - self._start)
            self._target[: self._filled] = self._ahead[self._start : self._start + self._filled]
            self._start += self._filled
        if self._filled < num_bytes:
            return None
        target, self._target = self._target, None
        return target

    def _compact(self) -> None:
        """Move what is unread to the front, so that the part it belongs to fits."""
        if self._start:
            unread = self._stop - self._start
            self._ahead[:unread] = self._ahead[self._start : self._stop]
            self._start, self._stop = 0, unread
