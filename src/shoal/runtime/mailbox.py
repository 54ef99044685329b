"""A queue between callbacks, which cannot wait, and one task, which does."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from shoal.runtime.waking import Signal

_Item = TypeVar("_Item")


class Mailbox(Generic[_Item]):
    """Items in order, kept until they are read; iterate over it, in one task at a time.

    It has no limit: it is for control messages, whose number the sender bounds.
    """

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._closed = False
        self._changed = Signal()

    def put(self, item: _Item) -> None:
        """Append an item; once closed, it is dropped."""
        if not self._closed:
            self._items.append(item)
            self._changed.notify()

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
