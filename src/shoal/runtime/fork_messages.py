"""What the supervisor and its fork server say to each other, and how it is framed on their Unix socket.

A frame is the length of its body in 4 bytes, little-endian, and the body in msgpack. A `ForkRole` travels with one file
descriptor, the role's end of its control pipe, and a `Forked` with another, a pidfd of the new process; descriptors
arrive in the order of the frames that they belong to.
"""

from __future__ import annotations

import struct

import msgspec

from shoal.errors import LocalProtocolError

TAG_NAME = "SHOAL_PROCESS_TAG"
"""Environment variable of every process below a supervisor, which has made up its value; it is no secret."""

_LENGTH = struct.Struct("<I")
_MAX_BODY_BYTES = 64 << 20


class Configure(msgspec.Struct, frozen=True, tag=True):
    """First request: what to import before the first fork."""

    preload: list[str]


class ForkRole(msgspec.Struct, frozen=True, tag=True):
    """Fork one role.

    Attributes:
        number: of this launch; a role that is started again gets a new one.
        entry: "package.module:function", resolved after the fork.
        payload: opaque to the runtime, handed to the entry; may hold secrets.
        output_path: standard output and error are appended to this file; empty: they go where the supervisor's go.
        nice: how much it gives way to other processes.
    """

    number: int
    role: str
    index: int
    entry: str
    payload: bytes
    output_path: str
    nice: int = 0


class Preloaded(msgspec.Struct, frozen=True, tag=True):
    """All modules are imported; forks are served from now on."""


class PreloadFailed(msgspec.Struct, frozen=True, tag=True):
    """A module cannot be imported, or one of them has started a thread; the fork server ends."""

    message: str


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The launch runs: its process says so itself, before it does anything else, and sends a pidfd of itself.

    So whoever has read the stream to its end knows every process that lives, also of a fork server that was killed
    in the middle of a fork.
    """

    number: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """The system refused another process."""

    number: int
    message: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The launch has ended and is about to be reaped: its exit code, or the signal that ended it, negated."""

    number: int
    code: int


Request = Configure | ForkRole
Reply = Preloaded | PreloadFailed | Forked | ForkFailed | Exited

_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """Return the frame of a message.

    Raises:
        LocalProtocolError: the message is larger than a frame may be.
    """
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    """Return a body with its length before it, as `FrameBuffer` takes it apart.

    Raises:
        LocalProtocolError: it is larger than a frame may be.
    """
    if len(body) > _MAX_BODY_BYTES:
        raise LocalProtocolError(
            f"a message to another process of this run has {len(body)} bytes, at most {_MAX_BODY_BYTES} may be sent"
        )
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts the bytes of a stream into the bodies of frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add what was read and return the bodies that are complete now."""
        self._bytes += data
        bodies: list[bytes] = []
        while len(self._bytes) >= _LENGTH.size:
            (body_bytes,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + body_bytes
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return bodies


def decode_request(body: bytes) -> Request:
    """Return the request in the body of a frame."""
    return msgspec.msgpack.decode(body, type=Request)


def decode_reply(body: bytes) -> Reply:
    """Return the reply in the body of a frame."""
    return msgspec.msgpack.decode(body, type=Reply)
