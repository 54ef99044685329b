"""What wakes tasks that wait for something to happen, and a queue of what has."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

_Item = TypeVar("_Item")


class Signal:
    """Something has happened: those who wait look again, since a signal does not say what.

    `wait` is for any number of tasks, which do nothing between looking and waiting that awaits or makes others notify.
    `take` is for one task, whatever it does in between: what happens meanwhile is kept for it.

    Attributes:
        is_kept: whether it was notified since it was last taken or forgotten.
    """

    def __init__(self) -> None:
        self._coming: anyio.Event | None = None  # for those that wait
        self.is_kept = False

    @property
    def coming(self) -> anyio.Event:
        """Set the next time. Who must do something between looking and waiting keeps it from before looking."""
        if self._coming is None:
            self._coming = anyio.Event()
        return self._coming

    def notify(self) -> None:
        """It has happened: wake all who wait now. Who waits from now on waits for the next time."""
        self.is_kept = True
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.set()

    async def wait(self) -> None:
        """Wait for the next time."""
        await self.coming.wait()

    async def take(self) -> None:
        """Return when it has happened since it was last taken, which may have been long ago."""
        while not self.is_kept:
            await self.wait()
        self.forget()

    def forget(self) -> None:
        """What has happened until now is known: `take` waits for the next time."""
        self.is_kept = False


async def pass_on(changed: Callable[[], Awaitable[object]], to: Signal) -> None:
    """Notify another signal whenever `changed` returns, until cancelled."""
    while True:
        await changed()
        to.notify()


class Mailbox(Generic[_Item]):
    """A queue between callbacks, which cannot wait, and one task, which does.

    Items are in order, and kept until they are read; iterate over it, in one task at a time.

    It has no limit: it is for control messages, whose number the sender bounds.
    """

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._closed = False
        self._changed = Signal()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _Item) -> None:
        """Append an item; once closed, it is dropped."""
        if not self._closed:
            self._items.append(item)
            self._changed.notify()

    def clear(self) -> None:
        """Drop the items that are there."""
        self._items.clear()

    def close(self) -> None:
        """Let the iteration end after the items that are there."""
        self._closed = True
        self._changed.notify()

    def __aiter__(self) -> Mailbox[_Item]:
        return self

    async def __anext__(self) -> _Item:
        """Return the next item, waiting for it.

        Raises:
            StopAsyncIteration: closed and empty.
        """
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            await self._changed.wait()
        return self._items.popleft()
