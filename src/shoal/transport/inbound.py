"""What an endpoint has received: the memory for it, its counters, and who is not read while too much lies untaken."""

from __future__ import annotations

from functools import partial

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.transport.buffer_pool import BufferPool
from shoal.transport.connection import Connection
from shoal.transport.event_queue import EventQueue
from shoal.transport.limits import TransportLimits
from shoal.transport.unread import Unread
from shoal.wire.frame import Frame


class Inbound:
    """Puts frames into the queue of an endpoint.

    Attributes:
        pool: of the tensors' memory.
        received_bytes: of all frames.
    """

    def __init__(self, events: EventQueue, limits: TransportLimits) -> None:
        self.pool = BufferPool(limits.max_pooled_bytes)
        self.received_bytes = 0
        self._events = events
        self._unread = Unread[Connection](limits.max_unread_bytes, limits.max_unread_total_bytes)

    def take(self, connection: Connection, peer: PeerId, frame: Frame) -> None:
        """Give a frame that came from a peer over this connection to the consumer, or queue it while that is busy."""
        self.received_bytes += frame.num_bytes
        received = Received(peer, frame.message, frame.tensors)
        if self._events.hand_over(received):
            return
        if self._unread.received(connection, frame.num_bytes):
            connection.read_on(False)
        self._events.put(received, partial(self._taken, connection, frame.num_bytes))

    def _taken(self, connection: Connection, num_bytes: int) -> None:
        for resumed in self._unread.taken(connection, num_bytes):
            resumed.read_on(True)
