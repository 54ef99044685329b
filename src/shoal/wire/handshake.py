"""The first exchange on every connection: who are you, and do we speak the same protocol?

dialler -- Hello -----------> listener
        <- Hello / Refusal --

offset  size  field (little-endian); this prefix and the form of a refusal are the same in all protocol versions
0       4     magic "SHHI"
4       2     protocol version of the sender
6       1     0 = Hello, 1 = Refusal
7       2     length of the body in bytes
9       ...   msgpack body
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec

from shoal.errors import MALFORMED, HandshakeError, Offence
from shoal.ids import PeerId, RunId
from shoal.wire.messages.base import Struct

PROTOCOL_VERSION: Final = 5
"""Of connections and of records in the DHT. Goes up, once between two releases, when the form of any message, record,
hello or frame changes, or the meaning of one: peers of two versions refuse each other, and say who has to upgrade."""

MAGIC: Final = b"SHHI"
PREFIX: Final = struct.Struct("<4sHBH")
MAX_BODY_BYTES: Final = 8192

_HELLO: Final = 0
_REFUSAL: Final = 1

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
MAX_ADDRESSES: Final = 8
"""Of a peer; who says more is refused."""


class Hello(Struct, frozen=True):
    """Who the sender is.

    `generation` is random per process: a peer that was restarted has another one. `connection` is random, chosen by the
    dialler and repeated by the listener. `previous` is the last connection between the two that the sender saw end: it
    tells a new attempt from one that crossed with the other side's.
    """

    run_id: RunId
    peer: PeerId
    role: _Text
    addresses: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
    generation: _Number
    connection: _Number
    previous: _Number


class Refusal(Struct, frozen=True):
    """Why there will be no connection. `duplicate`: there is or will be another one, dialled by the refusing side."""

    reason: str
    duplicate: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_HELLO_DECODER: Final = msgspec.msgpack.Decoder(Hello)
_REFUSAL_DECODER: Final = msgspec.msgpack.Decoder(Refusal)


def encode_handshake(said: Hello | Refusal, version: int = PROTOCOL_VERSION) -> bytes:
    """Return the bytes of a hello or a refusal.

    Raises:
        HandshakeError: longer than a peer accepts (too many or too long addresses).
    """
    if isinstance(said, Refusal):
        kind, body = _REFUSAL, _ENCODER.encode(Refusal(said.reason[:512], said.duplicate))
    else:
        kind, body = _HELLO, _ENCODER.encode(said)
    if len(body) > MAX_BODY_BYTES:
        raise HandshakeError(
            f"a hello of {len(body)} bytes is above the limit of {MAX_BODY_BYTES}: announce less", Offence.GARBAGE
        )
    return PREFIX.pack(MAGIC, version, kind, len(body)) + body


def version_misfit(theirs: int) -> str:
    """Return what it means that somebody speaks another version of the protocol, and who has to upgrade."""
    older = "the other side" if theirs < PROTOCOL_VERSION else "this side"
    return f"speaks protocol version {theirs}, this side {PROTOCOL_VERSION}: upgrade {older}"


class HandshakeDecoder:
    """Reads one hello or refusal and not a byte more: what follows are frames."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(PREFIX.size + MAX_BODY_BYTES))
        self._stop = 0
        self._wanted = PREFIX.size

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go."""
        return self._buffer[self._stop : self._wanted]

    def advance(self, num_bytes: int) -> Hello | Refusal | None:
        """Take note of `num_bytes` bytes in the last `get_buffer`; return what was said once it is complete.

        Raises:
            HandshakeError: not our protocol, or another version of it (the message says which side to upgrade).
        """
        self._stop += num_bytes
        if self._stop < PREFIX.size:
            return None
        magic, version, kind, body_bytes = PREFIX.unpack_from(self._buffer)
        if magic != MAGIC or kind not in (_HELLO, _REFUSAL) or not 0 < body_bytes <= MAX_BODY_BYTES:
            raise HandshakeError(
                f"the other side does not speak this protocol: it began with {magic!r}", Offence.GARBAGE
            )
        if version != PROTOCOL_VERSION:
            raise HandshakeError(f"the other side {version_misfit(version)}", Offence.VERSION)
        self._wanted = PREFIX.size + body_bytes
        if self._stop < self._wanted:
            return None
        decoder = _HELLO_DECODER if kind == _HELLO else _REFUSAL_DECODER
        try:
            return decoder.decode(self._buffer[PREFIX.size : self._wanted])
        except MALFORMED as error:
            raise HandshakeError(f"the other side's hello does not fit the schema: {error}", Offence.GARBAGE) from error


def check_hello(theirs: Hello, *, run_id: RunId, own_peer: PeerId, expected: PeerId | None = None) -> None:
    """Check that a peer may be talked to.

    Args:
        expected: the peer that this side meant to dial; None: any peer.

    Raises:
        HandshakeError: another run, another peer than dialled, or this peer's own id.
    """
    if theirs.run_id != run_id:
        raise HandshakeError(f"one side belongs to run {run_id!r}, the other to {theirs.run_id!r}", Offence.RUN)
    if theirs.peer == own_peer:
        raise HandshakeError(f"two processes use the peer id {own_peer}: give each its own key file", Offence.IDENTITY)
    if expected is not None and theirs.peer != expected:
        raise HandshakeError(f"dialled {expected} and got {theirs.peer}: the address is out of date", Offence.IDENTITY)
