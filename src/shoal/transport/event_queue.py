"""The queue between the connections and the one consumer of an endpoint's events.

    put ----------------------------------> queue -- next turn of the loop --> consumer
    hand_over -- `consume` waits for it ----------- within the call ---------> consumer

The turn of the loop would cost a small message as much time as being decoded. Both ways together keep the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio.lowlevel

from shoal.errors import LocalProtocolError
from shoal.transport.base import EventStream, TransportEvent

# A consumer that always finds something queued would never give way to the other tasks of the loop.
_EVENTS_PER_TURN: Final = 64


class EventQueue(EventStream):
    """First in, first out; `put` never waits. Whoever puts limits how much it puts."""

    def __init__(self) -> None:
        self._items: deque[tuple[TransportEvent, Callable[[], None] | None]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._turn = 0
        self._closed = False
        self._take: Callable[[TransportEvent], None] | None = None
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(
        self,
        event: TransportEvent,
        taken: Callable[[], None] | None = None,
        overtakes: Callable[[TransportEvent], bool] | None = None,
    ) -> None:
        """Append an event.

        Args:
            taken: called when the consumer takes it.
            overtakes: whether the event goes before another one. It is asked of the last event in the queue, then of
                those before it until it says no.
        """
        if self._closed:
            return
        if overtakes is None:
            self._items.append((event, taken))
        else:
            place = len(self._items)
            while place and overtakes(self._items[place - 1][0]):
                place -= 1
            self._items.insert(place, (event, taken))
        self._wake_up()

    def hand_over(self, event: TransportEvent) -> bool:
        """Give the event to a consumer that waits for it, without a turn of the loop; return whether it was given.

        Only for the event loop's callbacks, with nothing of the consumer's on the stack. Now and then it declines, so
        that the other tasks of the loop have a turn. What the consumer raises comes up in `consume`.
        """
        wake = self._wake
        # Whoever waits and has not been woken has nothing queued.
        if self._take is None or wake is None or wake.done() or self._turn >= _EVENTS_PER_TURN:
            return False
        self._turn += 1
        try:
            self._take(event)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the consumer's and not the connection's
            self._failure = error
            self._wake_up()
        return True

    async def consume(self, take: Callable[[TransportEvent], None]) -> None:
        self._take = take
        try:
            async for event in self:
                take(event)
        finally:
            self._take = None

    def close(self) -> None:
        """Drop what is queued and end the iteration."""
        self._closed = True
        self._items.clear()
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> TransportEvent:
        if self._wake is not None:
            raise LocalProtocolError("an endpoint's events have one consumer: two tasks wait for the next one")
        self._turn += 1
        if self._items and self._turn >= _EVENTS_PER_TURN:
            self._turn = 0
            await anyio.lowlevel.checkpoint()
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._turn = 0
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
        event, taken = self._items.popleft()
        if taken is not None:
            taken()
        return event
