"""Messages between a process and one that it has started, on a Unix socket.

A frame is the length of its body in 4 bytes, little-endian, and the body, a struct in msgpack. Each pair of programs
has its own kinds of messages: the fork server and its starter (`runtime.fork_messages`), children and their parents
(`runtime.child`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from types import UnionType
from typing import Generic, TypeVar

import msgspec

from shoal.errors import LocalProtocolError

_LENGTH = struct.Struct("<I")
_MAX_BODY_BYTES = 64 << 20
_READ_BYTES = 1 << 16

_Message = TypeVar("_Message")
_encoder = msgspec.msgpack.Encoder()


def framed(message: msgspec.Struct) -> bytes:
    """Return the frame of a message.

    Raises:
        LocalProtocolError: it is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > _MAX_BODY_BYTES:
        raise LocalProtocolError(
            f"a message to another process of this run has {len(body)} bytes, at most {_MAX_BODY_BYTES} may be sent"
        )
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[_Message]):
    """Cuts the bytes of a stream into messages of some kinds."""

    def __init__(self, kinds: UnionType | type[_Message]) -> None:
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kinds)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        """Add what was read and return the messages that are complete now.

        Raises:
            LocalProtocolError: the next frame is larger than a frame may be.
            ValueError, RecursionError: it is no message of these kinds (`errors.MALFORMED`).
        """
        self._bytes += data
        messages: list[_Message] = []
        while len(self._bytes) >= _LENGTH.size:
            (body_bytes,) = _LENGTH.unpack_from(self._bytes)
            if body_bytes > _MAX_BODY_BYTES:
                raise LocalProtocolError(
                    f"another process announces {body_bytes} bytes, at most {_MAX_BODY_BYTES} may come"
                )
            end = _LENGTH.size + body_bytes
            if len(self._bytes) < end:
                break
            messages.append(self._decoder.decode(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return messages


def received(stream: socket.socket, kinds: UnionType | type[_Message]) -> Iterator[_Message]:
    """Yield what the other end says, waiting for it, until it closes the socket or is gone."""
    frames = FrameReader[_Message](kinds)
    with suppress(ConnectionResetError):
        while data := stream.recv(_READ_BYTES):
            yield from frames.feed(data)
