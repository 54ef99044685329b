"""The order and the count of what a connection hands to its stream, at once or after a turn of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio

from shoal.clock import SystemClock
from shoal.ids import PeerId, StepKey
from shoal.transport.connection import Connection, ConnectionOwner, Stream
from shoal.transport.limits import TransportLimits
from shoal.transport.link_meter import LinkMeter
from shoal.transport.send_queue import Buffer
from shoal.transport.upload_cap import UploadCap
from shoal.wire.frame import EncodedFrame, encode_frame
from shoal.wire.messages.step import Refused


@dataclass
class FakeStream:
    """Takes everything, or says that it is full."""

    full: bool = False
    written: list[bytes] = field(default_factory=list[bytes])

    def writelines(self, list_of_data: Sequence[Buffer], /) -> None:
        self.written += [bytes(data) for data in list_of_data]

    def get_write_buffer_size(self) -> int:
        return int(self.full)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return False


class FakeOwner:
    def on_connect(self, connection: Connection) -> None:
        pass

    def allocate(self, num_bytes: int) -> memoryview:
        raise AssertionError("nothing is received")


def frame(number: int) -> EncodedFrame:
    return encode_frame(Refused(StepKey(0, 0, number, 0), "no"))


def connection_over(stream: FakeStream, limits: TransportLimits, cap: UploadCap | None = None) -> Connection:
    connection = Connection(cast("ConnectionOwner", FakeOwner()), limits)
    connection.connected(cast("Stream", stream))
    if cap is not None:
        connection.capped_by(cap)
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


async def test_control_frames_count_against_the_upload_cap() -> None:
    class CountingCap(UploadCap):
        spent_bytes = 0

        def spend(self, num_bytes: int) -> None:
            self.spent_bytes += num_bytes

    cap = CountingCap(1.0)
    connection = connection_over(FakeStream(), TransportLimits(), cap)
    connection.send(frame(0))
    assert cap.spent_bytes == frame(0).num_bytes
