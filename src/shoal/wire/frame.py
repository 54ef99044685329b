"""Frames: a fixed header, one encoded message, and the bytes of its tensors in pieces. The form, and how to encode it.

    offset  size  field (little-endian)
    0       4     magic "SHOL"
    4       1     frame version
    5       1     kind of traffic, an index into `TRAFFIC_ORDER`
    6       2     number of tensors
    8       4     length of the body in bytes
    12      8     length of the payload, all tensors together, in bytes
    20      4     length of the first piece of the payload in bytes
    24      ...   body: msgpack of [message, [[dtype, shape], ...]]
    ...     ...   the first piece: the first bytes of the tensors, one after the other

A payload that is longer than its first piece goes on in further pieces, each behind a header of its own:

    0       4     magic "SHPC"
    4       4     length of the piece in bytes, at least `MIN_PIECE_BYTES` unless it is the last one

Frames are of two classes: bulk ones carry tensors, or keep their place among those that do; all others are control.
Whole control frames may stand before the header of a further piece, so that none waits for a large tensor to end. A
bulk frame begins only when the one before it is complete: a receiver holds one that is incomplete, never more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from shoal.errors import LocalProtocolError
from shoal.wire.limits import NO_TENSORS, TENSORS_OF, WireLimits
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.base import Struct
from shoal.wire.messages.feed import GATHERED
from shoal.wire.tensors import MAX_DIMENSIONS, WireTensor

MAGIC: Final = b"SHOL"
FRAME_VERSION: Final = 2
HEADER: Final = struct.Struct("<4sBBHIQI")
PIECE_MAGIC: Final = b"SHPC"
PIECE_HEADER: Final = struct.Struct("<4sI")
MIN_PIECE_BYTES: Final = 4096
"""Shortest piece but a payload's first and last one: what keeps a peer from sending more headers than bytes."""

_FIRST_PIECE_OFFSET: Final = 20
_FIRST_PIECE: Final = struct.Struct("<I")

TRAFFIC_ORDER: Final[tuple[Traffic, ...]] = tuple(Traffic)
_TRAFFIC_INDEX: Final = {traffic: index for index, traffic in enumerate(TRAFFIC_ORDER)}
_DEFAULT_LIMITS: Final = WireLimits()

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Dtype = Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint16", "uint8", "bool"]


class TensorHeader(Struct, frozen=True):
    """Type and shape of a tensor whose bytes follow."""

    dtype: _Dtype
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class Body(Struct, frozen=True):
    """What a frame's body decodes to."""

    message: Message
    tensors: tuple[TensorHeader, ...]


_ENCODER: Final = msgspec.msgpack.Encoder()


class Frame(msgspec.Struct):
    """One received frame; `num_bytes` is its length on the wire, without the headers of further pieces."""

    message: Message
    tensors: tuple[WireTensor, ...]
    traffic: Traffic
    num_bytes: int


class EncodedFrame(msgspec.Struct):
    """One frame to be sent; only `cut` changes it.

    Attributes:
        head: header and body; cutting the payload writes the length of its first piece into it.
        payload: the tensors' own memory.
        traffic: what the receiver counts the bytes as.
        is_bulk: whether it keeps the order of the frames with tensors; control frames may overtake it.
        is_gathered: whether it waits for others that are sent in the same turn of the event loop.
    """

    head: bytearray
    payload: tuple[memoryview, ...]
    payload_bytes: int
    traffic: Traffic
    is_bulk: bool
    is_gathered: bool

    @property
    def num_bytes(self) -> int:
        """Length on the wire, without the headers of further pieces."""
        return len(self.head) + self.payload_bytes

    def cut(self, first_piece_bytes: int) -> None:
        """Write the length of the first piece of the payload into the head."""
        _FIRST_PIECE.pack_into(self.head, _FIRST_PIECE_OFFSET, first_piece_bytes)

    def in_one_piece(self) -> list[bytearray | memoryview]:
        """Return the buffers to be written one after the other for a frame that nothing interrupts."""
        self.cut(self.payload_bytes)
        return [self.head, *self.payload]


def is_bulk(traffic: Traffic, num_tensors: int) -> bool:
    """Return whether a frame is of the bulk class."""
    return num_tensors > 0 or traffic is not Traffic.CONTROL


def encode_frame(
    message: Message,
    tensors: Sequence[WireTensor] = (),
    traffic: Traffic = Traffic.CONTROL,
    limits: WireLimits | None = None,
) -> EncodedFrame:
    """Encode a frame. The tensors' own memory is in it, not a copy: it must stay unchanged until it is written.

    Args:
        tensors: as many as the message's type may carry (`TENSORS_OF`).
        traffic: what the receiver counts the bytes as.
        limits: what the receiver accepts; None: the defaults.

    Raises:
        LocalProtocolError: the frame would break a limit, so the receiver would close the connection.
    """
    limits = limits or _DEFAULT_LIMITS
    kind, num_tensors = type(message), len(tensors)
    if num_tensors not in TENSORS_OF.get(kind, NO_TENSORS):
        raise LocalProtocolError(f"{kind.__name__} does not carry {num_tensors} tensors")
    described: list[tuple[str, tuple[int, ...]]] = []
    payload: tuple[memoryview, ...] = ()
    payload_bytes = 0
    if num_tensors:
        for tensor in tensors:
            if tensor.num_bytes > limits.max_tensor_bytes:
                raise LocalProtocolError(
                    f"{kind.__name__}: a tensor of {tensor.num_bytes} bytes is above the limit of "
                    f"{limits.max_tensor_bytes}"
                )
            described.append((tensor.dtype, tensor.shape))
            payload_bytes += tensor.num_bytes
        payload = tuple([tensor.data for tensor in tensors if tensor.num_bytes])
    head = bytearray(HEADER.size)
    _ENCODER.encode_into((message, described), head, HEADER.size)
    body_bytes = len(head) - HEADER.size
    if body_bytes > limits.body_bytes_of(kind):
        raise LocalProtocolError(
            f"{kind.__name__} of {body_bytes} bytes is above the limit of {limits.body_bytes_of(kind)}"
        )
    HEADER.pack_into(head, 0, MAGIC, FRAME_VERSION, _TRAFFIC_INDEX[traffic], num_tensors, body_bytes, payload_bytes, 0)
    return EncodedFrame(head, payload, payload_bytes, traffic, is_bulk(traffic, num_tensors), kind in GATHERED)
