"""What goes next on one connection: control frames first, the payloads of bulk frames in pieces. Decisions only.

    put(frame) --> control ----------------------------------------> \\
               --> step, round -----> \\                               take() --> one batch for the stream
               --> background -----> the one whose payload is open --/

Promises, of any order of `put` and `take`:

- Frames of one class leave in the order in which they were put; a bulk frame of a step goes before those of
  averages, and these before all others, that have not begun to leave.
- A control frame that is put leaves with the next batches: it waits for control frames before it, and for what has been
  taken already, never for the rest of a tensor.
- A bulk frame never overtakes a control frame that was put before it. Those put later do not hold it up either: as soon
  as the ones before it have left, each batch has a piece of it.
- A batch has at most `control_bytes` of control frames (one frame may be longer) and about `piece_bytes` of bulk.
"""

from __future__ import annotations

from collections import deque

from shoal.transport.uplink import Urgency
from shoal.wire.frame import MIN_PIECE_BYTES, PIECE_HEADER, PIECE_MAGIC, EncodedFrame
from shoal.wire.messages import Traffic

Buffer = bytes | bytearray | memoryview

_FRAME_BYTES = 256
"""Of memory, for a frame and its place in a queue, beside its bytes."""
_URGENCY = {
    Traffic.ACTIVATIONS: Urgency.STEP,
    Traffic.GRADIENTS: Urgency.STEP,
    Traffic.CONTROL: Urgency.STEP,
    Traffic.PSEUDO_GRADIENTS: Urgency.ROUND,
    Traffic.STATE: Urgency.BACKGROUND,
}
"""By what a bulk frame carries."""


def message_bytes(frame: EncodedFrame) -> int:
    """Return what a frame that waits takes in memory, about, without its tensors."""
    return len(frame.head) + _FRAME_BYTES


class SendQueue:
    """The frames of one connection that the stream has not been given yet.

    Attributes:
        queued_bytes: of the frames that have not left, without the headers of further pieces.
        message_bytes: of memory that only this queue holds: frames without their tensors.
    """

    def __init__(self, *, piece_bytes: int, control_bytes: int) -> None:
        """Start empty.

        Args:
            piece_bytes: the most bulk frames in one batch.
            control_bytes: the most control frames in one batch.
        """
        self._piece_bytes = piece_bytes
        self._control_bytes = control_bytes
        self._control: deque[EncodedFrame] = deque()
        self._num_control_put = 0
        self._num_control_taken = 0
        # With each bulk frame the number of control frames that were put before it.
        self._bulk: dict[Urgency, deque[tuple[int, EncodedFrame]]] = {urgency: deque() for urgency in Urgency}
        self._open: deque[memoryview] = deque()  # what is left of the payload that has begun to leave
        self._open_bytes = 0
        self._open_urgency = Urgency.BACKGROUND
        self.queued_bytes = 0
        self.message_bytes = 0

    def __bool__(self) -> bool:
        return self.queued_bytes > 0

    @property
    def urgency(self) -> Urgency | None:
        """Of the bulk frames that are still here, or a part of one; None: there is none.

        What waits for the rest of a less urgent frame to leave makes that rest as urgent.
        """
        for urgency, frames in self._bulk.items():
            if frames or (self._open_bytes and self._open_urgency is urgency):
                return urgency
        return None

    def put(self, frame: EncodedFrame) -> None:
        """Append a frame."""
        self.queued_bytes += frame.num_bytes
        self.message_bytes += message_bytes(frame)
        if frame.is_bulk:
            self._bulk[_URGENCY[frame.traffic]].append((self._num_control_put, frame))
        else:
            self._num_control_put += 1
            self._control.append(frame)

    def take(self, *, with_bulk: bool = True) -> list[Buffer]:
        """Remove and return the next batch; empty: nothing may leave."""
        batch: list[Buffer] = []
        self._take_control(batch)
        if with_bulk:
            self._take_bulk(batch)
        return batch

    def _take_control(self, batch: list[Buffer]) -> None:
        left_bytes = self._control_bytes
        while self._control and left_bytes > 0:
            head = self._control.popleft().head
            batch.append(head)
            left_bytes -= len(head)
            self._took_message(head)
            self._num_control_taken += 1

    def _take_bulk(self, batch: list[Buffer]) -> None:
        left_bytes = self._piece_bytes
        if self._open_bytes:
            num_bytes = min(self._open_bytes, max(left_bytes, MIN_PIECE_BYTES))
            batch.append(PIECE_HEADER.pack(PIECE_MAGIC, num_bytes))
            self._take_payload(batch, num_bytes)
            left_bytes -= num_bytes
        while left_bytes > 0 and (frame := self._next_bulk()) is not None:
            self._open.extend(frame.payload)
            self._open_bytes = frame.payload_bytes
            left_bytes -= len(frame.head)
            num_bytes = min(frame.payload_bytes, max(left_bytes, 0))
            frame.cut(num_bytes)
            batch.append(frame.head)
            self._took_message(frame.head)
            self._take_payload(batch, num_bytes)
            left_bytes -= num_bytes
            if self._open_bytes:
                return

    def _next_bulk(self) -> EncodedFrame | None:
        """Remove and return the bulk frame that may begin to leave now."""
        for urgency, frames in self._bulk.items():
            if frames and frames[0][0] <= self._num_control_taken:
                self._open_urgency = urgency
                return frames.popleft()[1]
        return None

    def _took_message(self, head: bytearray) -> None:
        self.queued_bytes -= len(head)
        self.message_bytes -= len(head) + _FRAME_BYTES

    def _take_payload(self, batch: list[Buffer], num_bytes: int) -> None:
        """Move the next bytes of the open payload to the batch."""
        self._open_bytes -= num_bytes
        self.queued_bytes -= num_bytes
        while num_bytes:
            part = self._open[0]
            if len(part) <= num_bytes:
                batch.append(self._open.popleft())
                num_bytes -= len(part)
            else:
                batch.append(part[:num_bytes])
                self._open[0] = part[num_bytes:]
                num_bytes = 0
