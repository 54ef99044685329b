"""That something has changed, for tasks that wait for it and then look again."""

from __future__ import annotations

import anyio


class Changes:
    """Wakes all who wait now; who comes later waits for the change after that.

    Attributes:
        coming: set with the next change; for who awaits something else between looking and waiting.
    """

    def __init__(self) -> None:
        self.coming = anyio.Event()

    def notify(self) -> None:
        """Something has changed."""
        self.coming.set()
        self.coming = anyio.Event()

    async def wait(self) -> None:
        """Wait for the next change."""
        await self.coming.wait()


async def first_of(*events: anyio.Event) -> None:
    """Wait until one of these is set."""
    async with anyio.create_task_group() as tasks:

        async def wait(event: anyio.Event) -> None:
            await event.wait()
            tasks.cancel_scope.cancel()

        for event in events:
            tasks.start_soon(wait, event)
