"""Payloads in pieces: control frames may stand between them, and nothing else; hostile pieces are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wire.decoded import decoded

from shoal.errors import RemoteProtocolError
from shoal.ids import StepKey
from shoal.wire.frame import HEADER, MIN_PIECE_BYTES, PIECE_HEADER, PIECE_MAGIC, encode_frame
from shoal.wire.frame_decoder import READ_AHEAD_BYTES, FrameDecoder
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.step import Abort, Forward, Opened, Refused
from shoal.wire.tensors import WireTensor, empty_bytes

KEY = StepKey(1, 0, 7, 2)
ABORT = encode_frame(Abort(KEY)).head


def content(num_bytes: int) -> bytes:
    return bytes(position * 7 % 251 for position in range(num_bytes))


def in_pieces(data: bytes, sizes: Sequence[int], between: Sequence[bytes] = (), number: int = 1) -> bytes:
    """Return a `Forward` of `data` in pieces of the given sizes; before each further one goes one of `between`."""
    tensor = WireTensor("uint8", (len(data),), memoryview(data))
    frame = encode_frame(Forward(KEY, number), [tensor], Traffic.ACTIVATIONS)
    frame.cut(sizes[0])
    raw, start = bytes(frame.head) + data[: sizes[0]], sizes[0]
    for place, size in enumerate(sizes[1:]):
        raw += between[place] if place < len(between) else b""
        raw += PIECE_HEADER.pack(PIECE_MAGIC, size) + data[start : start + size]
        start += size
    return raw


def received(decoder: FrameDecoder, raw: bytes, cuts: Sequence[int] = ()) -> list[tuple[Message, list[bytes]]]:
    return [(f.message, [bytes(t.data) for t in f.tensors]) for f in decoded(decoder, raw, cuts)]


def test_control_frames_between_pieces_come_first_and_the_tensor_is_whole() -> None:
    data = content(3 * MIN_PIECE_BYTES + 5)
    long = encode_frame(Refused(KEY, "r" * (READ_AHEAD_BYTES + 1))).head
    raw = in_pieces(data, [0, MIN_PIECE_BYTES, 2 * MIN_PIECE_BYTES, 5], [ABORT, bytes(long), ABORT + ABORT])
    raw += encode_frame(Opened(KEY)).head
    wanted = [Abort(KEY), Refused(KEY, "r" * (READ_AHEAD_BYTES + 1)), Abort(KEY), Abort(KEY)]
    for cuts in ([], [1] * len(raw), [HEADER.size + 3, 7, 4000, 8]):
        frames = received(FrameDecoder(), raw, cuts)
        assert frames == [*((message, []) for message in wanted), (Forward(KEY, 1), [data]), (Opened(KEY), [])]


@given(
    sizes=st.lists(st.integers(MIN_PIECE_BYTES, 3 * MIN_PIECE_BYTES), max_size=4),
    first=st.integers(0, 9000),
    last=st.integers(1, 9000),
    num_between=st.lists(st.integers(0, 3), max_size=6),
    cuts=st.lists(st.integers(1, 20_000), max_size=60),
)
def test_pieces_of_any_size_cut_in_any_way_are_put_together(
    sizes: list[int], first: int, last: int, num_between: list[int], cuts: list[int]
) -> None:
    data = content(first + sum(sizes) + last)
    between = [bytes(ABORT) * count for count in num_between]
    raw = in_pieces(data, [first, *sizes, last], between) + in_pieces(b"xy", [2], number=2)
    frames = received(FrameDecoder(), raw, cuts)
    num_aborts = sum(num_between[: len(sizes) + 1])
    assert frames == [(Abort(KEY), [])] * num_aborts + [(Forward(KEY, 1), [data]), (Forward(KEY, 2), [b"xy"])]


def test_nothing_of_a_piece_passes_through_the_read_ahead_buffer_after_the_first_one() -> None:
    data = content(2 * MIN_PIECE_BYTES)
    raw = in_pieces(data, [MIN_PIECE_BYTES, MIN_PIECE_BYTES])
    decoder = FrameDecoder()
    assert received(decoder, raw[: -MIN_PIECE_BYTES - PIECE_HEADER.size]) == []
    assert len(decoder.get_buffer()) == PIECE_HEADER.size
    assert received(decoder, raw[-MIN_PIECE_BYTES - PIECE_HEADER.size : -MIN_PIECE_BYTES]) == []
    assert len(decoder.get_buffer()) == MIN_PIECE_BYTES
    assert received(decoder, raw[-MIN_PIECE_BYTES:]) == [(Forward(KEY, 1), [data])]
    assert len(decoder.get_buffer()) == READ_AHEAD_BYTES


def test_a_stream_that_ends_between_two_pieces_ends_within_a_frame() -> None:
    decoder = FrameDecoder()
    received(decoder, in_pieces(content(MIN_PIECE_BYTES + 1), [MIN_PIECE_BYTES]) + bytes(ABORT))
    assert decoder.mid_frame


def test_a_peer_can_make_the_other_one_hold_one_tensor_and_no_more() -> None:
    allocated: list[int] = []

    def allocate(num_bytes: int) -> memoryview:
        allocated.append(num_bytes)
        return empty_bytes(num_bytes)

    decoder = FrameDecoder(allocate=allocate)
    started = in_pieces(content(100_000), [10])
    received(decoder, started + bytes(ABORT) * 50)
    with pytest.raises(RemoteProtocolError, match="within another one"):
        received(decoder, started)
    assert allocated == [100_000]


DATA = content(2 * MIN_PIECE_BYTES)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (PIECE_HEADER.pack(PIECE_MAGIC, 5) + bytes(HEADER.size), "starts with b'SHPC'"),
        (in_pieces(DATA, [0, MIN_PIECE_BYTES, 0]), "a piece of 0 bytes, 4096 are left"),
        (in_pieces(DATA, [0, MIN_PIECE_BYTES - 1]), "a piece of 4095 bytes"),
        (in_pieces(DATA, [1, 2 * MIN_PIECE_BYTES]), "a piece of 8192 bytes, 8191 are left"),
        (in_pieces(DATA, [2 * MIN_PIECE_BYTES + 1]), "a first piece of 8193 bytes, of 8192"),
        (in_pieces(DATA, [2 * MIN_PIECE_BYTES, MIN_PIECE_BYTES]) + bytes(HEADER.size), "starts with b'SHPC'"),
        (in_pieces(DATA, [8]) + encode_frame(Opened(KEY), (), Traffic.STATE).head, "state with 0 tensors within"),
        (in_pieces(DATA, [8]) + b"GARBAGE" * 4, "starts with"),
    ],
)
def test_pieces_that_break_a_rule_are_refused_with_the_reason(raw: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        received(FrameDecoder(), raw)


@given(position=st.integers(0, 100_000), value=st.integers(0, 255), cuts=st.lists(st.integers(1, 9000), max_size=20))
def test_a_changed_byte_never_raises_anything_but_a_protocol_error(position: int, value: int, cuts: list[int]) -> None:
    pieces = [10, MIN_PIECE_BYTES, MIN_PIECE_BYTES - 10]
    raw = bytearray(in_pieces(DATA, pieces, [bytes(ABORT), bytes(ABORT)]) + in_pieces(b"xy", [2]))
    # Where headers and bodies are: the changes that matter.
    places = [
        n for n in range(len(raw)) if n < 100 or n > len(raw) - 100 or MIN_PIECE_BYTES < n < MIN_PIECE_BYTES + 200
    ]
    raw[places[position % len(places)]] = value
    try:
        frames = received(FrameDecoder(), bytes(raw), cuts)
    except RemoteProtocolError:
        return
    assert len(frames) <= 4
