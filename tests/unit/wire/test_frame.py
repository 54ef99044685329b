"""Frames survive any way of cutting their bytes; bytes that are no frame end in RemoteProtocolError, nothing else."""

from __future__ import annotations

import typing
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wire.decoded import decoded

from shoal.errors import LocalProtocolError, RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.wire.frame import FRAME_VERSION, HEADER, MAGIC, Frame, encode_frame
from shoal.wire.frame_decoder import READ_AHEAD_BYTES, FrameDecoder
from shoal.wire.limits import LONG_MESSAGES, TENSORS_OF, WireLimits
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import Metrics, StepReport
from shoal.wire.messages.round import CommitRecord, SignedRecord, StageHashes
from shoal.wire.messages.snapshot import Snapshot
from shoal.wire.messages.step import Forward, Opened, Refused
from shoal.wire.messages.transfer import ContentKind, ContentName, Missing, Want
from shoal.wire.tensors import ITEM_BYTES, WireTensor

KEY = StepKey(1, 0, 7, 2)
BALLOT = Ballot(3, PeerId("client"), 1)


def tensor(num_bytes: int, fill: int = 7) -> WireTensor:
    return WireTensor("uint8", (num_bytes,), memoryview(bytearray([fill]) * num_bytes))


def joined(message: Message, *tensors: WireTensor, traffic: Traffic = Traffic.CONTROL) -> bytes:
    return b"".join(encode_frame(message, tensors, traffic).in_one_piece())


def feed(decoder: FrameDecoder, raw: bytes, pieces: Iterable[int] = ()) -> list[Frame]:
    return list(decoded(decoder, raw, pieces))


def test_every_message_type_is_decodable_and_named_by_one_tag() -> None:
    types = typing.get_args(Message)
    tags = [kind.__struct_config__.tag for kind in types]
    assert len(types) > 40
    assert len(set(tags)) == len(tags)
    assert set(TENSORS_OF) <= set(types)
    assert set(types) >= LONG_MESSAGES


def test_a_frame_comes_back_as_it_was_sent() -> None:
    part = RingPart(b"group", 4, True, 0, 2, 3)
    data = memoryview(bytearray(range(24)))
    raw = joined(part, WireTensor("float32", (2, 3), data), traffic=Traffic.PSEUDO_GRADIENTS)
    (frame,) = feed(FrameDecoder(), raw)
    assert frame.message == part
    assert frame.traffic is Traffic.PSEUDO_GRADIENTS
    assert frame.num_bytes == len(raw)
    assert [(t.dtype, t.shape, bytes(t.data)) for t in frame.tensors] == [("float32", (2, 3), bytes(range(24)))]


def test_a_tensor_is_sent_from_its_own_memory_and_received_into_writable_memory() -> None:
    source = bytearray(1 << 20)
    header, payload = encode_frame(
        Forward(KEY, 0), [WireTensor("uint8", (1 << 20,), memoryview(source))]
    ).in_one_piece()
    source[5] = 99
    assert payload[5] == 99
    decoder = FrameDecoder()
    assert feed(decoder, bytes(header)) == []
    space = decoder.get_buffer()
    assert len(space) == 1 << 20
    space[:] = payload
    (frame,) = decoder.advance(1 << 20)
    space[6] = 98
    assert frame.tensors[0].data[6] == 98


def test_frames_may_be_cut_at_each_byte() -> None:
    raw = joined(Forward(KEY, 1), tensor(9)) + joined(Opened(KEY)) + joined(Forward(KEY, 2), tensor(0))
    whole = feed(FrameDecoder(), raw)
    assert [f.message for f in whole] == [Forward(KEY, 1), Opened(KEY), Forward(KEY, 2)]
    for cut in range(1, len(raw)):
        assert feed(FrameDecoder(), raw, [cut]) == whole
    assert feed(FrameDecoder(), raw, [1] * len(raw)) == whole


@pytest.mark.parametrize("size", [READ_AHEAD_BYTES - 40, READ_AHEAD_BYTES, READ_AHEAD_BYTES + 1, 300_000])
def test_bodies_around_and_above_the_read_ahead_buffer_arrive(size: int) -> None:
    messages = [Refused(KEY, "a" * size), Opened(KEY), Refused(KEY, "b" * size)]
    raw = b"".join(joined(message) for message in messages)
    assert [f.message for f in feed(FrameDecoder(), raw)] == messages
    assert [f.message for f in feed(FrameDecoder(), raw, [7, 30_000, 1, 64_000])] == messages


def test_a_stream_that_ends_within_a_frame_is_noticed() -> None:
    decoder = FrameDecoder()
    raw = joined(Opened(KEY))
    assert not decoder.mid_frame
    feed(decoder, raw[:-1])
    assert decoder.mid_frame
    feed(decoder, raw[-1:])
    assert not decoder.mid_frame


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=6),
    pieces=st.lists(st.integers(1, 3000), max_size=40),
    reasons=st.lists(st.text(max_size=50), max_size=6),
)
def test_any_frames_cut_in_any_way_arrive_in_order(sizes: list[int], pieces: list[int], reasons: list[str]) -> None:
    sent: list[tuple[Message, list[WireTensor]]] = [(Forward(KEY, i), [tensor(n, i)]) for i, n in enumerate(sizes)]
    sent += [(Refused(KEY, reason), []) for reason in reasons]
    raw = b"".join(joined(message, *tensors) for message, tensors in sent)
    frames = feed(FrameDecoder(), raw, pieces)
    assert [(f.message, [bytes(t.data) for t in f.tensors]) for f in frames] == [
        (message, [bytes(t.data) for t in tensors]) for message, tensors in sent
    ]


@given(raw=st.binary(max_size=400), pieces=st.lists(st.integers(1, 50), max_size=10))
def test_garbage_is_refused_or_waited_on_but_never_breaks_the_decoder(raw: bytes, pieces: list[int]) -> None:
    decoder = FrameDecoder()
    try:
        frames = feed(decoder, raw, pieces)
    except RemoteProtocolError:
        return
    assert frames == []
    assert len(raw) < HEADER.size


@given(body=st.binary(max_size=200), payload=st.integers(0, 64), count=st.integers(0, 2))
def test_any_body_behind_a_good_header_is_refused_or_a_message(body: bytes, payload: int, count: int) -> None:
    raw = HEADER.pack(MAGIC, FRAME_VERSION, 0, count, len(body), payload, 0) + body
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError):
        feed(decoder, raw)


@given(position=st.integers(0, 10_000), value=st.integers(0, 255), data=st.data())
def test_a_changed_byte_never_raises_anything_but_a_protocol_error(
    position: int, value: int, data: st.DataObject
) -> None:
    raw = bytearray(joined(Forward(KEY, 1), tensor(40)) + joined(Metrics("server", PeerId("a"), 1, {"x": 1.5})))
    raw[position % len(raw)] = value
    cut = data.draw(st.integers(0, len(raw)))
    decoder = FrameDecoder()
    try:
        frames = feed(decoder, bytes(raw), [cut] if cut else [])
    except RemoteProtocolError:
        return
    assert len(frames) <= 2


def packed(
    body: object,
    *,
    version: int = FRAME_VERSION,
    magic: bytes = MAGIC,
    traffic: int = 4,
    count: int = 0,
    extra: int = 0,
) -> bytes:
    raw = msgspec.msgpack.encode(body)
    return HEADER.pack(magic, version, traffic, count, len(raw), extra, extra) + raw


FWD = ["fwd", list(KEY), 1]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (packed([["opened", list(KEY)], []], magic=b"HTTP"), "HTTP"),
        (packed([["opened", list(KEY)], []], version=9), "version 9"),
        (packed([["opened", list(KEY)], []], traffic=5), "traffic"),
        (packed([["nonsense", 1], []]), "fits no message"),
        (packed([["opened"], []]), "fits no message"),
        (packed([["opened", list(KEY), "more"], []]), "fits no message"),
        (packed([["opened", ["x", 0, 0, 0]], []]), "fits no message"),
        (packed([["opened", list(KEY)], [["uint8", [4]]]], count=1, extra=4), "1 tensors"),
        (packed([FWD, []]), "0 tensors"),
        (packed([FWD, [["uint8", [4]]]], count=1, extra=5), "the header says 5"),
        (packed([FWD, [["object", [4]]]], count=1, extra=4), "fits no message"),
        (packed([FWD, [["uint8", [-4]]]], count=1, extra=4), "fits no message"),
        (packed([FWD, [["uint8", [1] * 9]]], count=1, extra=1), "fits no message"),
        (packed([FWD, [["uint8", [1 << 39, 1 << 39]]]], count=1, extra=8), "the header says 8"),
        (packed([FWD, [["uint8", [4]]] * 6], count=6, extra=24), "6 tensors"),
    ],
)
def test_a_frame_that_breaks_a_rule_is_refused_with_the_reason(raw: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        feed(FrameDecoder(), raw)


def test_an_oversized_tensor_is_refused_before_anything_is_allocated_for_it() -> None:
    limits = WireLimits(max_tensor_bytes=1000)
    raw = joined(Forward(KEY, 1), tensor(1001))
    decoder = FrameDecoder(limits)
    with pytest.raises(RemoteProtocolError, match="1001 bytes"):
        feed(decoder, raw[: HEADER.size])
    assert len(feed(FrameDecoder(limits), joined(Forward(KEY, 1), tensor(1000)))) == 1


def test_an_oversized_body_is_refused_from_its_header() -> None:
    raw = HEADER.pack(MAGIC, FRAME_VERSION, 0, 0, 17 << 20, 0, 0)
    with pytest.raises(RemoteProtocolError, match="limit 16777216"):
        feed(FrameDecoder(), raw)


def test_only_messages_with_logs_or_records_may_be_long() -> None:
    lenient = WireLimits(max_message_bytes=16 << 20)
    raw = b"".join(encode_frame(Refused(KEY, "a" * (1 << 20)), limits=lenient).in_one_piece())
    with pytest.raises(RemoteProtocolError, match="Refused of"):
        feed(FrameDecoder(), raw)
    commit = CommitRecord(BALLOT, SignedRecord(b"r" * (2 << 20), PeerId("a"), b"s" * 64))
    assert feed(FrameDecoder(), joined(commit))[0].message == commit


def test_a_sender_refuses_what_the_receiver_would() -> None:
    with pytest.raises(LocalProtocolError, match="does not carry 0 tensors"):
        encode_frame(Forward(KEY, 1))
    with pytest.raises(LocalProtocolError, match="does not carry 1 tensors"):
        encode_frame(Opened(KEY), [tensor(1)])
    with pytest.raises(LocalProtocolError, match="above the limit"):
        encode_frame(Forward(KEY, 1), [tensor(11)], limits=WireLimits(max_tensor_bytes=10))
    with pytest.raises(LocalProtocolError, match="above the limit"):
        encode_frame(Refused(KEY, "a" * (2 << 20)))


def test_special_numbers_and_every_element_type_survive() -> None:
    report = StepReport(0, 1, KEY, 8, 512, float("inf"), 1e-300, 0.1, True, 0.25, 1.5)
    assert feed(FrameDecoder(), joined(report))[0].message == report
    for dtype, item_bytes in ITEM_BYTES.items():
        sent = WireTensor(dtype, (3,), memoryview(bytearray(3 * item_bytes)))
        assert feed(FrameDecoder(), joined(Forward(KEY, 1), sent))[0].tensors == (sent,)


def test_the_answer_to_every_question_for_a_content_fits_into_a_frame() -> None:
    for digest in ("0" * 64, "0" * 65, "0" * (WireLimits().max_message_bytes - 30)):
        raw = joined(Want(ContentName(ContentKind.STATE, 0, digest)))
        if len(digest) == 64:
            [frame] = feed(FrameDecoder(), raw)
            assert isinstance(frame.message, Want)
            joined(Missing(frame.message.name, 2**63 - 1))
        else:
            with pytest.raises(RemoteProtocolError):
                feed(FrameDecoder(), raw)


def test_a_snapshot_whose_digest_would_not_fit_into_the_answer_is_none() -> None:
    snapshot = Snapshot(PeerId("owner"), 0, 1, 0, "genesis", StageHashes("p", "m", "b"), (), 10, "0" * 65)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)
