"""A part of a peer that works on an event loop of its own while the peer's calls come from outside of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import anyio
from anyio.from_thread import BlockingPortal


@contextmanager
def serving(
    portal: BlockingPortal, serve: Callable[[anyio.Event, anyio.Event], Awaitable[None]]
) -> Generator[None, None, None]:
    """Run `serve(ready, end)` inside of this context: it sets `ready` when it serves, and ends when `end` is set."""
    ready, end = portal.call(anyio.Event), portal.call(anyio.Event)
    task = portal.start_task_soon(serve, ready, end)
    portal.call(ready.wait)
    try:
        yield
    finally:
        portal.call(end.set)
        task.result()
