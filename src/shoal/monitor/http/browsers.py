"""The browsers that look at a run, and what each has still to be told.

    news --tell--> backlog (bounded), and a queue for each browser (bounded): who does not read is dropped
    a browser that comes back says what it has got last: the rest from the backlog, or all of it anew

A message is one of server-sent events: `id: START-NUMBER`, `event: KIND`, `data: JSON`. START is of this process: what
an earlier one has sent is not in this backlog, so its browsers get all of it anew.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import ObjectReceiveStream
from anyio.streams.memory import MemoryObjectSendStream

MAX_BROWSERS: Final = 8
_MAX_QUEUED: Final = 64
_MAX_BACKLOG_BYTES: Final = 2 * 2**20
_MOST_DIGITS: Final = 15
"""Of a message's number: of some thousands Python makes no number."""


class Browsers:
    """All of them."""

    def __init__(self, past: Callable[[], bytes], unix_s: Callable[[], float]) -> None:
        """Wait for the first one.

        Args:
            past: returns all that a page shows, as JSON.
        """
        self._past = past
        self._unix_s = unix_s
        self._start = secrets.token_hex(4)
        self._number = 0
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._queues: dict[MemoryObjectSendStream[bytes], anyio.CancelScope] = {}

    def __len__(self) -> int:
        """How many look."""
        return len(self._queues)

    def tell(self, kind: str, data: Any) -> None:
        """Tell all of them; one whose queue is full is dropped, and asks again when it reads again."""
        self._number += 1
        message = self._message(kind, msgspec.json.encode(data))
        self._backlog.append(message)
        self._backlog_bytes += len(message)
        while self._backlog_bytes > _MAX_BACKLOG_BYTES:
            self._backlog_bytes -= len(self._backlog.popleft())
        self._queue(message)

    def tick(self) -> None:
        """Tell all of them the time: so they know who is silent, the run or the link."""
        self._queue(b"event: tick\ndata: %.1f\n\n" % self._unix_s())

    def end(self) -> None:
        """Tell all of them that the run is over, and that nothing follows."""
        self.tell("end", {})
        for queue in self._queues:
            queue.close()
        self._queues.clear()

    @asynccontextmanager
    async def join(self, last_id: str) -> AsyncGenerator[AsyncGenerator[bytes] | None]:
        """Give a browser its messages for as long as the context is open; None if there is no room.

        Args:
            last_id: of the message that it has got last; empty: it has got none.
        """
        if len(self._queues) >= MAX_BROWSERS:
            yield None
            return
        queue, messages = anyio.create_memory_object_stream[bytes](_MAX_QUEUED)
        missed = self._missed(last_id)
        with queue, messages, anyio.CancelScope() as scope:
            self._queues[queue] = scope
            try:
                yield self._messages(missed, messages)
            finally:
                self._queues.pop(queue, None)

    async def _messages(self, missed: bytes, messages: ObjectReceiveStream[bytes]) -> AsyncGenerator[bytes]:
        yield missed
        async for message in messages:
            yield message

    def _queue(self, message: bytes) -> None:
        for queue, scope in list(self._queues.items()):
            try:
                queue.send_nowait(message)
            except anyio.WouldBlock:
                scope.cancel()

    def _missed(self, last_id: str) -> bytes:
        """Return what there is to say first: what a browser has missed, or all of it."""
        start, _, number = last_id.partition("-")
        if start == self._start and number.isascii() and number.isdigit() and len(number) <= _MOST_DIGITS:
            missed = self._number - int(number)
            if 0 <= missed <= len(self._backlog):
                return b"".join(list(self._backlog)[len(self._backlog) - missed :]) or b": nothing\n\n"
        return self._message("past", self._past())

    def _message(self, kind: str, data: bytes) -> bytes:
        return b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (self._start.encode(), self._number, kind.encode(), data)
