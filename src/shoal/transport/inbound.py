"""What an endpoint has received: the memory for it, its counters, who is not read while too much lies untaken, and who
is lost where too much has come of what is not whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Generic, TypeVar

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.transport.buffer_pool import BufferPool
from shoal.transport.connection import Connection
from shoal.transport.event_queue import EventQueue
from shoal.transport.holdings import Holdings
from shoal.transport.limits import TransportLimits
from shoal.wire.frame import Frame
from shoal.wire.frame_decoder import FrameDecoder

Key = TypeVar("Key", bound=Hashable)

_OBJECT_BYTES: Final = 16
"""Of memory, for a byte of a message: a number, or a list of one, is an object of dozens."""
_LEAST_BYTES: Final = 64 * 1024
"""Of a frame, so that of one connection 4,096 wait at most."""


class Inbound:
    """Puts frames into the queue of an endpoint.

    Attributes:
        pool: of the tensors' memory.
        received_bytes: of all frames.
    """

    def __init__(self, events: EventQueue, limits: TransportLimits, source_of: Callable[[PeerId], str]) -> None:
        """Start without any.

        Args:
            source_of: returns the host at the other end of a peer's connection.
        """
        self.pool = BufferPool(limits.max_pooled_bytes)
        self.received_bytes = 0
        self._events = events
        self._unfinished = Holdings(source_of)
        self._max_unfinished_bytes = limits.max_unfinished_total_bytes
        total_bytes = limits.max_unread_total_bytes
        self._unread = Unread[Connection](limits.max_unread_bytes, total_bytes, total_bytes // limits.max_connections)

    def take(self, connection: Connection, peer: PeerId, frame: Frame) -> None:
        """Give a frame that came from a peer over this connection to the consumer, or queue it while that is busy."""
        self.received_bytes += frame.num_bytes
        received = Received(peer, frame.message, frame.tensors)
        if self._events.hand_over(received):
            return
        held_bytes = _held_bytes(frame)
        if self._unread.received(connection, held_bytes):
            connection.read_on(False)
        self._events.put(received, partial(self._taken, connection, held_bytes))

    def part(self, peer: PeerId, frames: FrameDecoder) -> tuple[PeerId, str] | None:
        """Count what a peer's connection holds of a long frame that is not whole.

        To read nobody would not help: what is not whole is held until the rest comes, which may be never.

        Returns:
            The peer that is to be lost for it, and why; None: there is room.
        """
        held = self._unfinished
        held.note(peer, frames.filled_bytes + (0 if self.pool.is_usual else frames.unfilled_bytes))
        if held.total_bytes <= self._max_unfinished_bytes:
            return None
        most = held.most()
        all_hold = (
            f"{held.total_bytes} bytes of frames that are not whole have come from all peers, "
            f"and no more than {self._max_unfinished_bytes} may"
        )
        return most, f"{all_hold}: {held[most]} of them from this one"

    def lost(self, peer: PeerId) -> None:
        """What has come of a frame of this peer is gone with its connection."""
        self._unfinished.note(peer, 0)

    def _taken(self, connection: Connection, held_bytes: int) -> None:
        for resumed in self._unread.taken(connection, held_bytes):
            resumed.read_on(True)


def _held_bytes(frame: Frame) -> int:
    """Return what a frame takes in memory, about: tensors what they are, all else many times what was sent. A small
    one counts for its time: what others have sent waits behind it."""
    tensor_bytes = sum(len(tensor.data) for tensor in frame.tensors)
    return max(_LEAST_BYTES, tensor_bytes + _OBJECT_BYTES * (frame.num_bytes - tensor_bytes))


class Unread(Generic[Key]):
    """The bytes of received frames that the consumer has not taken. Decisions only.

    A connection is not read from any more when a frame of it brings its own bytes above its limit, or those of all
    above theirs and its own above its share; it is read again when all have fallen to a half. One whose frames were all
    taken is always read, and one that holds no more than its share, however many others fill the rest.
    """

    def __init__(self, max_each_bytes: int, max_total_bytes: int, share_bytes: int) -> None:
        self._max_each_bytes = max_each_bytes
        self._max_total_bytes = max_total_bytes
        self._share_bytes = share_bytes
        self._bytes: dict[Key, int] = {}
        self._total_bytes = 0
        self._stopped: set[Key] = set()

    def received(self, key: Key, num_bytes: int) -> bool:
        """Count a frame; return whether its connection is not to be read from now."""
        self._bytes[key] = self._bytes.get(key, 0) + num_bytes
        self._total_bytes += num_bytes
        is_crowded = self._total_bytes > self._max_total_bytes and self._bytes[key] > self._share_bytes
        if self._bytes[key] > self._max_each_bytes or is_crowded:
            self._stopped.add(key)
            return True
        return False

    def taken(self, key: Key, num_bytes: int) -> list[Key]:
        """Count a frame that was taken; return the connections to be read from again."""
        self._bytes[key] -= num_bytes
        if not self._bytes[key]:
            del self._bytes[key]
        self._total_bytes -= num_bytes
        if not self._stopped:
            return []
        has_room = self._total_bytes * 2 <= self._max_total_bytes
        resumed = [
            stopped
            for stopped in (self._stopped if has_room else {key} & self._stopped)
            if not self._bytes.get(stopped) or (has_room and self._bytes[stopped] * 2 <= self._max_each_bytes)
        ]
        self._stopped.difference_update(resumed)
        return resumed
