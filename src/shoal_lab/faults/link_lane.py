"""One direction of one proxied connection: two tasks, which carry out what the model decides.

source socket -- read(): take --> LinkModel --> parcels -- write(): when each arrives --> sink socket
"""

from __future__ import annotations

import asyncio
import enum
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Protocol

from shoal.clock import Clock
from shoal.runtime.waking import Signal
from shoal_lab.faults.link import PACKET_BYTES
from shoal_lab.faults.link_model import LinkModel, Parcel

_READ_BYTES: Final = 64 * 1024
# With a full queue, wait for so much room: reading every packet on its own would cost a wake-up each.
_ROOM_BYTES: Final = 8 * 1024
# Between two hosts the receiver's window ends this; without it, a slow reader on an unlimited line would fill memory.
_MAX_HELD_BYTES: Final = 64 * 1024 * 1024
# Timers are no finer: what is due within half a tick goes at once.
_TICK_S: Final = 1e-3


class Flow(enum.Enum):
    """What happens to the bytes of a direction."""

    PASS = "pass"
    HOLD = "hold"
    DROP = "drop"


class Disconnect(Protocol):
    """Ends a proxied connection at once."""

    def __call__(self, *, reset: bool) -> None: ...


class Way:
    """One direction of the link, shared by all connections.

    Attributes:
        flow: whether bytes arrive; changed by `set_flow`.
        taken_bytes: how many bytes it has taken so far.
        news: one of these has changed.
    """

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self.flow = Flow.PASS
        self.taken_bytes = 0
        self.news = Signal()

    def set_flow(self, flow: Flow) -> None:
        """Treat bytes like this from now on."""
        self.flow = flow
        self.news.notify()

    async def left(self, *flows: Flow) -> None:
        """Return when the flow is none of these."""
        while self.flow in flows:
            await self.news.wait()


class Lane:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, sink: socket.socket, way: Way, clock: Clock, end: Disconnect) -> None:
        """Do nothing yet; `read` and `write` are to run side by side.

        Args:
            source: to read from; neither socket blocks.
            end: ends both directions of the connection.
        """
        self._source = source
        self._sink = sink
        self._way = way
        self._clock = clock
        self._end = end
        self._held: deque[Parcel] = deque()
        self._held_bytes = 0
        self._news = Signal()
        self._was_reset = False

    async def read(self) -> None:
        """Give the model what comes, until the stream ends; the end takes its way like any other bytes."""
        loop, way = asyncio.get_running_loop(), self._way
        data = b"more"
        while data:
            room_bytes = await self._room_bytes()
            try:
                data = await loop.sock_recv(self._source, int(min(room_bytes, _READ_BYTES)))
            except ConnectionError:
                data, self._was_reset = b"", True
            way.taken_bytes += len(data)
            if not data or way.flow is not Flow.DROP:
                self._held.extend(way.model.take(self._clock.now_s(), data))
                self._held_bytes += len(data)
                self._news.notify()
            way.news.notify()

    async def write(self) -> None:
        """Write what has arrived, when it has, until the stream's end has."""
        loop = asyncio.get_running_loop()
        sink_is_gone = False
        while True:
            while not self._held:
                await self._news.wait()
            is_end = not self._held[0].data
            await self._way.left(Flow.HOLD, *([Flow.DROP] if is_end else []))
            early_s = self._held[0].arrives_s - self._clock.now_s()
            if early_s > _TICK_S / 2:
                await self._clock.sleep_s(early_s)
                continue
            if is_end:
                break
            due = b"".join(self._take_due())
            if not sink_is_gone:
                try:
                    await loop.sock_sendall(self._sink, due)
                except ConnectionError:
                    # The source hears of it by the other direction, which takes its time.
                    sink_is_gone = True
        if self._was_reset:
            self._end(reset=True)
        elif not sink_is_gone:
            with suppress(OSError):
                self._sink.shutdown(socket.SHUT_WR)

    async def _room_bytes(self) -> float:
        """Return how much may be read now, once that is worth a read."""
        model = self._way.model
        while True:
            await self._way.left(Flow.HOLD)
            room_bytes = model.room_bytes(self._clock.now_s())
            if self._held_bytes > _MAX_HELD_BYTES:
                await self._news.wait()
            elif room_bytes < PACKET_BYTES:
                await self._clock.sleep_s(max(_TICK_S, model.room_at_s(_ROOM_BYTES) - self._clock.now_s()))
            else:
                return room_bytes

    def _take_due(self) -> Iterator[bytes]:
        due_s = self._clock.now_s() + _TICK_S / 2
        while self._held and self._held[0].data and self._held[0].arrives_s <= due_s:
            data = self._held.popleft().data
            self._held_bytes -= len(data)
            yield data
        self._news.notify()
