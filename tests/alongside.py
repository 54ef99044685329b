"""What runs beside a test for as long as the test looks at it, and waiting for what it does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup


@asynccontextmanager
async def alongside(*calls: Callable[[], Awaitable[object]]) -> AsyncIterator[TaskGroup]:
    """Run these until the block has ended."""
    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(call)
        yield tasks
        tasks.cancel_scope.cancel()


async def until(holds: Callable[[], object]) -> None:
    """Let the others go on until that holds."""
    while not holds():
        await anyio.lowlevel.checkpoint()
