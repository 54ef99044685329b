"""The order and the count of what a connection hands to its stream, at once or after a turn of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.ids import PeerId, StepKey
from shoal.transport.connection import Connection, ConnectionOwner, Stream
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkMeter
from shoal.transport.send_queue import Buffer
from shoal.transport.uplink import Uplink, Urgency
from shoal.wire.frame import EncodedFrame, encode_frame
from shoal.wire.messages import Traffic
from shoal.wire.messages.feed import GiveBack, NoteAttempt
from shoal.wire.messages.step import Forward, Refused
from shoal.wire.tensors import WireTensor


@dataclass
class FakeStream:
    """Takes everything, or says that it is full."""

    full: bool = False
    written: list[bytes] = field(default_factory=list[bytes])
    num_writes: int = 0

    def writelines(self, list_of_data: Sequence[Buffer], /) -> None:
        self.num_writes += 1
        self.written += [bytes(data) for data in list_of_data]

    def get_write_buffer_size(self) -> int:
        return int(self.full)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.written.append(b"the end")


class FakeOwner:
    def on_connect(self, connection: Connection) -> None:
        pass

    def on_lost(self, connection: Connection, reason: str) -> None:
        pass

    def allocate(self, num_bytes: int) -> memoryview:
        raise AssertionError("nothing is received")


def frame(number: int) -> EncodedFrame:
    return encode_frame(Refused(StepKey(0, 0, number, 0), "no"))


def connection_over(stream: FakeStream, limits: TransportLimits, uplink: Uplink | None = None) -> Connection:
    connection = Connection(cast("ConnectionOwner", FakeOwner()), limits)
    connection.connected(cast("Stream", stream))
    if uplink is not None:
        connection.leave_by(uplink)
    connection.accept(PeerId("peer"), 1, LinkMeter(SystemClock()))
    return connection


async def test_a_control_frame_goes_to_an_idle_stream_at_once_and_never_before_those_that_wait() -> None:
    stream = FakeStream()
    connection = connection_over(stream, TransportLimits(control_batch_bytes=1))
    frames = [frame(number) for number in range(20)]
    connection.send(frames[0])
    assert stream.written == [frames[0].head]
    stream.full = True
    for waiting in frames[1:19]:
        connection.send(waiting)
    assert len(stream.written) == 1
    stream.full = False
    connection.resume_writing()
    assert 1 < len(stream.written) < 19, "the rest waits for the next turn of the loop"
    connection.send(frames[19])
    await anyio.wait_all_tasks_blocked()
    with anyio.fail_after(10):
        await connection.flushed()
    assert stream.written == [sent.head for sent in frames]


def gathered_frame(number: int) -> EncodedFrame:
    return encode_frame(GiveBack(number))


async def test_gathered_frames_of_a_turn_of_the_loop_leave_in_one_write() -> None:
    stream = FakeStream()
    connection = connection_over(stream, TransportLimits())
    frames = [gathered_frame(number) for number in range(8)]
    for together in frames[:4]:
        connection.send(together)
    assert stream.num_writes == 0
    await connection.flushed()
    assert (stream.num_writes, len(stream.written)) == (1, 4)
    for together in frames[4:]:
        connection.send(together)
    await connection.flushed()
    assert stream.num_writes == 2
    assert stream.written == [sent.head for sent in frames]


async def test_what_is_not_gathered_leaves_at_once_with_what_was_sent_before_it() -> None:
    stream = FakeStream()
    connection = connection_over(stream, TransportLimits())
    note = encode_frame(NoteAttempt(StepKey(0, 1, 0, 0), (), 1))
    frames = [gathered_frame(0), gathered_frame(1), note, gathered_frame(2)]
    for each in frames[:3]:
        connection.send(each)
    assert stream.written == [sent.head for sent in frames[:3]], "before any other peer is told anything"
    assert stream.num_writes == 1
    connection.send(frames[3])
    assert connection.queued_bytes
    assert not connection._empty.is_set()
    await connection.flushed()
    assert stream.written == [sent.head for sent in frames]


async def test_gathered_frames_behind_a_full_socket_leave_when_it_has_room() -> None:
    stream = FakeStream(full=True)
    connection = connection_over(stream, TransportLimits())
    connection.send(gathered_frame(0))
    await anyio.wait_all_tasks_blocked()
    assert stream.written == []
    stream.full = False
    connection.resume_writing()
    await connection.flushed()
    assert stream.written == [gathered_frame(0).head]


async def test_what_was_gathered_has_left_when_this_side_ends_the_connection() -> None:
    stream = FakeStream()
    connection = connection_over(stream, TransportLimits())
    connection.send(gathered_frame(0))
    connection.close("enough")
    connection.send(gathered_frame(1))
    await anyio.wait_all_tasks_blocked()
    assert stream.written == [gathered_frame(0).head, b"the end"]


async def test_who_waits_for_gathered_frames_goes_on_when_the_connection_is_lost_before_they_leave() -> None:
    stream = FakeStream()
    connection = connection_over(stream, TransportLimits())
    connection.send(gathered_frame(0))
    connection.connection_lost(None)
    with anyio.fail_after(60):
        await connection.flushed()
    await anyio.wait_all_tasks_blocked()
    assert stream.written == []
    assert connection.queued_bytes == 0


async def test_control_frames_count_against_the_upload_cap() -> None:
    class CountingUplink(Uplink):
        spent_bytes = 0

        def spend(self, num_bytes: int, urgency: Urgency | None) -> None:
            assert urgency is None
            self.spent_bytes += num_bytes

    uplink = CountingUplink(1.0)
    connection = connection_over(FakeStream(), TransportLimits(), uplink)
    connection.send(frame(0))
    assert uplink.spent_bytes == frame(0).num_bytes


def tensor_frame(traffic: Traffic) -> EncodedFrame:
    return encode_frame(Forward(StepKey(0, 0, 0, 0), 0), [WireTensor("uint8", (9,), memoryview(bytes(9)))], traffic)


@pytest.mark.parametrize("traffic", [Traffic.STATE, Traffic.PSEUDO_GRADIENTS])
async def test_averages_and_state_leave_when_the_socket_has_taken_the_tensors_of_steps(traffic: Traffic) -> None:
    uplink, stepping, averaging = Uplink(), FakeStream(), FakeStream()
    to_next, to_replica = (connection_over(each, TransportLimits(), uplink) for each in (stepping, averaging))
    stepping.full = True
    to_next.send(tensor_frame(Traffic.ACTIVATIONS))
    to_replica.send(tensor_frame(traffic))
    to_replica.send(frame(1))
    await anyio.wait_all_tasks_blocked()
    assert averaging.written == [frame(1).head], "of the replica's, control frames alone"
    stepping.full = False
    to_next.resume_writing()
    with anyio.fail_after(60):
        await to_replica.flushed()
    assert len(averaging.written) > 1


async def test_a_connection_that_ends_with_tensors_of_a_step_holds_up_nothing() -> None:
    uplink, stepping, averaging = Uplink(), FakeStream(), FakeStream()
    to_next, to_replica = (connection_over(each, TransportLimits(), uplink) for each in (stepping, averaging))
    stepping.full = True
    to_next.send(tensor_frame(Traffic.GRADIENTS))
    to_next.connection_lost(None)
    to_replica.send(tensor_frame(Traffic.STATE))
    assert averaging.written
