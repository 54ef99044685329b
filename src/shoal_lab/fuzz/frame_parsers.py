"""The parsers of a connection: its handshake, its frames, the messages in them; and all of these together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final, cast, get_args

import msgspec
import msgspec.inspect as schema

from shoal.clock import Clock
from shoal.errors import HandshakeError, InvariantViolation, RemoteProtocolError
from shoal.ids import PeerId, RunId
from shoal.transport.connection import Connection, Stream
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkMeter
from shoal.wire.frame import FRAME_VERSION, HEADER, MAGIC, MIN_PIECE_BYTES, PIECE_HEADER, PIECE_MAGIC, Frame
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.handshake import PREFIX, HandshakeDecoder, Hello, Refusal, check_hello, encode_handshake
from shoal.wire.limits import NO_TENSORS, TENSORS_OF, WireLimits
from shoal.wire.messages import Message
from shoal.wire.tensors import empty_bytes
from shoal_lab.fuzz.grammar import tree_of
from shoal_lab.fuzz.mutation import changed_bytes, changed_tree
from shoal_lab.fuzz.parser import Parser

RUN: Final = RunId("fuzzed")
LIMITS: Final = WireLimits(max_message_bytes=1 << 16, max_long_message_bytes=1 << 18, max_tensor_bytes=1 << 16)
"""Small ones: what lies above them is refused in the same way, and inputs stay short."""
SAMPLES_EACH: Final = 4
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_KINDS: Final = {str(cast("schema.StructType", schema.type_info(kind)).tag): kind for kind in get_args(Message)}


def _counts_of(tree: Any) -> range:
    """How many tensors may follow a message."""
    return TENSORS_OF.get(_KINDS[tree[0]], NO_TENSORS)


def _frame(tree: Any, random: Random) -> bytes:
    """A frame whose header fits its body, with tensors of so many bytes as the body says."""
    count = random.choice(_counts_of(tree))
    sizes = [random.choice((0, 1, 5, 300)) for _ in range(count)]
    body, payload = _encode([tree, [["uint8", [size]] for size in sizes]]), bytes(sum(sizes))
    return _header(random, count, len(body), len(payload), len(payload)) + body + payload


def _header(random: Random, count: int, body_bytes: int, payload_bytes: int, piece_bytes: int) -> bytes:
    traffic = random.randrange(4) if count else 4
    return HEADER.pack(MAGIC, FRAME_VERSION, traffic, count, body_bytes, payload_bytes, piece_bytes)


def _frame_in_pieces(tree: Any, between: bytes, random: Random) -> bytes:
    """A frame with a tensor in two or three pieces, and control frames between them."""
    size = MIN_PIECE_BYTES * 2 + 17
    body = _encode([tree, [["uint8", [size]]]])
    first = random.choice((0, 1, 4096, size - 5))
    parts = [_header(random, 1, len(body), size, first), body, bytes(first)]
    left = size - first
    while left:
        piece = min(left, MIN_PIECE_BYTES + random.randrange(4096))
        parts += [between, PIECE_HEADER.pack(PIECE_MAGIC, piece), bytes(piece)]
        left -= piece
    return b"".join(parts)


def _allocated(num_bytes: int) -> memoryview:
    if num_bytes > LIMITS.max_tensor_bytes:
        raise InvariantViolation(f"memory for {num_bytes} bytes is taken, the limit is {LIMITS.max_tensor_bytes}")
    return empty_bytes(num_bytes)


def _reads(data: bytes, random: Random) -> Iterator[memoryview]:
    """The input in reads: all at once, in a few, or (short ones) byte by byte."""
    view, longest = memoryview(data), random.choice((len(data), len(data), 4096, 64, 7, 1 if len(data) < 600 else 512))
    while view:
        size = random.randint(1, max(1, longest)) if longest < len(data) else len(view)
        yield view[:size]
        view = view[size:]


def _deliver(target: Any, data: bytes, random: Random) -> Iterator[Any]:
    """Write an input into the buffers that a decoder or a connection names, as the event loop does."""
    for read in _reads(data, random):
        while read:
            room: memoryview = target.get_buffer()
            if not len(room):
                raise InvariantViolation("there is no room for the next byte, so nothing would ever be read")
            size = min(len(room), len(read))
            room[:size] = read[:size]
            read = read[size:]
            yield target.advance(size)


class _Messages(Parser):
    """What frames are made of: trees of all kinds of messages."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        infos = [schema.type_info(kind) for kind in get_args(Message)]
        self._trees = [tree_of(info, self._random) for info in infos for _ in range(SAMPLES_EACH)]
        self._bulk = [tree for tree in self._trees if _KINDS[tree[0]] in TENSORS_OF]
        self._control = [tree for tree in self._trees if tree not in self._bulk]

    def feed(self, data: bytes, random: Random) -> bool:
        decoder, taken = FrameDecoder(LIMITS, _allocated), False
        try:
            for frames in _deliver(decoder, data, random):
                for frame in frames:
                    taken = self._is_sound(frame)
        except RemoteProtocolError:
            return False
        return taken

    def _is_sound(self, frame: Frame) -> bool:
        if len(frame.tensors) not in TENSORS_OF.get(type(frame.message), NO_TENSORS):
            raise InvariantViolation(f"{type(frame.message).__name__} was taken with {len(frame.tensors)} tensors")
        return True


class Frames(_Messages):
    """Streams of up to four frames with wrong bytes."""

    name = "frames"

    def make(self, random: Random) -> bytes:
        parts: list[bytes] = []
        for _ in range(random.randint(1, 4)):
            if random.random() < 0.3:
                between = _frame(random.choice(self._control), random) * random.randrange(3)
                parts.append(_frame_in_pieces(random.choice(self._bulk), between, random))
            else:
                parts.append(_frame(random.choice(self._trees), random))
        other = _frame(random.choice(self._trees), random)
        place = random.randrange(len(parts))
        parts[place] = changed_bytes(parts[place], random, other)
        return b"".join(parts)


class Messages(_Messages):
    """Frames around messages that say something wrong; their header fits."""

    name = "messages"

    def make(self, random: Random) -> bytes:
        tree = random.choice(self._trees)
        count = random.choice(_counts_of(tree))
        tensors = [["uint8", [3]] for _ in range(count)]
        whole = changed_tree([tree, tensors], random, random.choice(self._trees))
        body = _encode(whole)
        return _header(random, count, len(body), 3 * count, 3 * count) + body + bytes(3 * count)


# -- the handshake


def _hello(random: Random) -> bytes:
    """A hello or a refusal, of which the bytes or what it says are wrong."""
    if random.random() < 0.1:
        plain = encode_handshake(Refusal("crowded", random.random() < 0.5))
    else:
        plain = encode_handshake(_SAID)
    if random.random() < 0.5:
        return changed_bytes(plain, random)
    magic, version, kind, _ = PREFIX.unpack_from(plain)
    body = _encode(changed_tree(_decode(plain[PREFIX.size :]), random))
    return PREFIX.pack(magic, version, kind, min(len(body), 0xFFFF)) + body


_SAID: Final = Hello(RUN, PeerId("peer"), "server", ("tcp:127.0.0.1:1",), 1, 2, 0)


class HelloParser(Parser):
    """The decoder of the first bytes, and the check of what they say."""

    name = "hello"

    def make(self, random: Random) -> bytes:
        return _hello(random)

    def feed(self, data: bytes, random: Random) -> bool:
        decoder = HandshakeDecoder()
        try:
            for said in _deliver(decoder, data, random):
                if isinstance(said, Hello):
                    check_hello(said, run_id=RUN, own_peer=PeerId("me"))
                if said is not None:
                    return True
        except HandshakeError:
            pass
        return False


class _Owner:
    """What an endpoint does with a connection of somebody who is known by nothing but what he says."""

    def __init__(self, clock: Clock) -> None:
        self.meter = LinkMeter(clock)
        self.num_frames = 0
        # Its text alone: the error would keep the connection alive.
        self.refused = ""

    def on_connect(self, connection: Connection) -> None: ...
    def on_open(self, connection: Connection) -> None: ...
    def on_lost(self, connection: Connection, reason: str) -> None: ...

    def on_handshake(self, connection: Connection, said: Hello | Refusal) -> None:
        if isinstance(said, Refusal):
            connection.close(said.reason)
            return
        check_hello(said, run_id=RUN, own_peer=PeerId("me"))
        connection.accept(said.peer, said.connection, self.meter)

    def allocate(self, num_bytes: int) -> memoryview:
        return _allocated(num_bytes)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        self.num_frames += 1

    def on_part(self, connection: Connection, frames: FrameDecoder) -> None: ...

    def on_violation(self, connection: Connection, error: Exception) -> None:
        self.refused = str(error)


class _Socket:
    """A stream to somebody who reads everything."""

    def __init__(self) -> None:
        self.is_closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def writelines(self, list_of_data: Sequence[Any], /) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class _Loop:
    """Between the input and a connection: what the event loop calls, until it is closed."""

    def __init__(self, connection: Connection, socket: _Socket) -> None:
        self._connection, self._socket = connection, socket
        self._waste = memoryview(bytearray(1 << 16))

    def get_buffer(self) -> memoryview:
        return self._waste if self._socket.is_closed else self._connection.get_buffer(-1)

    def advance(self, num_bytes: int) -> None:
        if not self._socket.is_closed:
            self._connection.buffer_updated(num_bytes)


class ConnectionParser(Frames):
    """A whole connection; its hello is mostly good, or no frame would be reached."""

    name = "connection"

    def __init__(self, seed: int, clock: Clock) -> None:
        super().__init__(seed)
        self._clock, self._limits = clock, TransportLimits(wire=LIMITS)

    def make(self, random: Random) -> bytes:
        hello = encode_handshake(_SAID) if random.random() < 0.8 else _hello(random)
        return hello + super().make(random)

    def feed(self, data: bytes, random: Random) -> bool:
        owner, socket = _Owner(self._clock), _Socket()
        connection = Connection(owner, self._limits)
        connection.connection_made(cast("asyncio.BaseTransport", cast("Stream", socket)))
        for _ in _deliver(_Loop(connection, socket), data, random):
            pass
        connection.connection_lost(None)
        if owner.refused and not socket.is_closed:
            raise InvariantViolation(f"the connection goes on after {owner.refused}")
        return owner.num_frames > 0
