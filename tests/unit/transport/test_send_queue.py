"""The order in which frames leave a connection, and how much leaves at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wire.decoded import decoded

from shoal.ids import StepKey
from shoal.transport.send_queue import Buffer, SendQueue
from shoal.transport.uplink import Urgency
from shoal.wire.frame import MIN_PIECE_BYTES, EncodedFrame, encode_frame
from shoal.wire.frame_decoder import FrameDecoder
from shoal.wire.messages import Message, Traffic
from shoal.wire.messages.step import Abort, Forward, Refused
from shoal.wire.tensors import WireTensor

PIECE = 2 * MIN_PIECE_BYTES


def key(number: int) -> StepKey:
    return StepKey(1, 0, number, 0)


def control(number: int) -> EncodedFrame:
    return encode_frame(Abort(key(number)))


def bulk(number: int, num_bytes: int, traffic: Traffic = Traffic.ACTIVATIONS) -> EncodedFrame:
    data = bytes([number % 251]) * num_bytes
    return encode_frame(Forward(key(number), 0), [WireTensor("uint8", (num_bytes,), memoryview(data))], traffic)


def queue(piece_bytes: int = PIECE, control_bytes: int = 1000) -> SendQueue:
    return SendQueue(piece_bytes=piece_bytes, control_bytes=control_bytes)


def messages_of(decoder: FrameDecoder, batch: Sequence[Buffer]) -> list[Message]:
    """Return the messages that are complete with this batch; their tensors are checked on the way."""
    messages: list[Message] = []
    for buffer in batch:
        for frame in decoded(decoder, memoryview(buffer)):
            for tensor in frame.tensors:
                assert isinstance(frame.message, Forward)
                assert set(tensor.data) <= {frame.message.key.number % 251}
            messages.append(frame.message)
    return messages


def num_bytes_of(batch: Sequence[Buffer]) -> int:
    return sum(len(buffer) for buffer in batch)


def test_a_control_frame_waits_for_one_piece_of_a_large_tensor_at_most() -> None:
    sending, decoder = queue(), FrameDecoder()
    sending.put(bulk(0, 1_000_000))
    assert messages_of(decoder, sending.take()) == []
    sending.put(control(1))
    batch = sending.take()
    assert batch[0] == control(1).head
    assert num_bytes_of(batch) < PIECE + 200
    assert messages_of(decoder, batch) == [Abort(key(1))]
    rest: list[Message] = []
    while sending:
        rest += messages_of(decoder, sending.take())
    assert rest == [Forward(key(0), 0)]


def test_control_frames_without_end_do_not_hold_up_a_tensor() -> None:
    sending, decoder = queue(), FrameDecoder()
    sending.put(bulk(0, 10 * PIECE))
    for number in range(1, 12):
        for _ in range(100):
            sending.put(control(number))
        if Forward(key(0), 0) in messages_of(decoder, sending.take()):
            return
    pytest.fail("the tensor did not get through")


def test_a_tensor_does_not_overtake_the_control_frames_before_it() -> None:
    sending, decoder = queue(control_bytes=1), FrameDecoder()
    for number in range(3):
        sending.put(control(number))
    sending.put(bulk(9, 10))
    sending.put(control(10))
    batches = [messages_of(decoder, sending.take()) for _ in range(4)]
    assert batches == [[Abort(key(0))], [Abort(key(1))], [Abort(key(2)), Forward(key(9), 0)], [Abort(key(10))]]


def test_a_message_sent_as_bulk_keeps_its_place_behind_the_tensors_before_it() -> None:
    sending, decoder = queue(), FrameDecoder()
    sending.put(bulk(0, 5 * PIECE, Traffic.STATE))
    sending.put(encode_frame(Abort(key(1)), (), Traffic.STATE))
    messages: list[Message] = []
    while sending:
        messages += messages_of(decoder, sending.take())
    assert messages == [Forward(key(0), 0), Abort(key(1))]


def test_an_average_overtakes_a_state_that_has_not_begun_to_leave_and_a_step_both() -> None:
    sending, decoder = queue(), FrameDecoder()
    sending.put(bulk(0, 5 * PIECE, Traffic.STATE))
    assert messages_of(decoder, sending.take()) == []
    for number, traffic in enumerate((Traffic.STATE, Traffic.PSEUDO_GRADIENTS, Traffic.ACTIVATIONS), start=1):
        sending.put(bulk(number, PIECE, traffic))
    messages: list[Message] = []
    while sending:
        messages += messages_of(decoder, sending.take())
    assert messages == [Forward(key(number), 0) for number in (0, 3, 2, 1)]


@pytest.mark.parametrize(
    ("traffic", "urgency"),
    [(Traffic.STATE, Urgency.BACKGROUND), (Traffic.PSEUDO_GRADIENTS, Urgency.ROUND)],
)
def test_a_step_overtakes_what_has_not_begun_to_leave_and_makes_urgent_what_has(
    traffic: Traffic, urgency: Urgency
) -> None:
    sending, decoder = queue(), FrameDecoder()
    sending.put(bulk(0, 5 * PIECE, traffic))
    sending.put(bulk(1, PIECE, traffic))
    assert messages_of(decoder, sending.take()) == []
    assert sending.urgency is urgency
    sending.put(bulk(2, PIECE))
    messages: list[Message] = []
    while sending:
        assert sending.urgency is (urgency if Forward(key(2), 0) in messages else Urgency.STEP)
        messages += messages_of(decoder, sending.take())
    assert messages == [Forward(key(number), 0) for number in (0, 2, 1)]
    assert sending.urgency is None


def test_what_is_held_back_lets_control_frames_through() -> None:
    sending = queue()
    sending.put(bulk(0, 5 * PIECE))
    sending.put(control(1))
    assert sending.take(with_bulk=False) == [control(1).head]
    assert sending.take(with_bulk=False) == []
    assert sending.urgency is Urgency.STEP
    assert num_bytes_of(sending.take()) > PIECE // 2


def test_small_tensors_leave_together() -> None:
    sending, decoder = queue(), FrameDecoder()
    for number in range(20):
        sending.put(bulk(number, 10))
    assert len(messages_of(decoder, sending.take())) == 20
    assert not sending


def test_a_long_control_frame_leaves_whole() -> None:
    sending, decoder = queue(), FrameDecoder()
    long = Refused(key(0), "x" * 100_000)
    sending.put(encode_frame(long))
    assert messages_of(decoder, sending.take()) == [long]


@given(
    puts=st.lists(
        st.one_of(
            st.none(),
            st.tuples(st.integers(0, 5 * PIECE), st.sampled_from((Traffic.ACTIVATIONS, Traffic.STATE))),
            st.sampled_from(("take", "hold")),
        ),
        max_size=60,
    ),
    piece_bytes=st.integers(1, 3 * MIN_PIECE_BYTES),
    control_bytes=st.integers(1, 300),
)
def test_whatever_is_put_and_taken_in_any_order_the_promises_hold(
    puts: list[str | tuple[int, Traffic] | None], piece_bytes: int, control_bytes: int
) -> None:
    sending, decoder = queue(piece_bytes, control_bytes), FrameDecoder()
    got: list[int] = []
    put: dict[Traffic, list[int]] = {traffic: [] for traffic in Traffic}

    def take(with_bulk: bool = True) -> None:
        batch = sending.take(with_bulk=with_bulk)
        assert num_bytes_of(batch) <= control_bytes + max(piece_bytes, MIN_PIECE_BYTES) + 200
        got.extend(message.key.number for message in messages_of(decoder, batch))  # type: ignore[union-attr]

    for number, what in enumerate(puts):
        if isinstance(what, str):
            take(what == "take")
            continue
        frame = control(number) if what is None else bulk(number, *what)
        put[frame.traffic].append(number)
        before = sending.queued_bytes
        sending.put(frame)
        assert sending.queued_bytes == before + frame.num_bytes
    while sending:
        take()
    assert sending.queued_bytes == 0
    assert sending.take() == []
    for numbers in put.values():
        assert [number for number in got if number in numbers] == numbers
    controls = put.pop(Traffic.CONTROL)
    for place, number in enumerate(got):
        if number not in controls:
            assert {earlier for earlier in controls if earlier < number} <= set(got[:place])
