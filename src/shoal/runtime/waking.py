"""What wakes tasks that wait for something to happen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio


class Signal:
    """Something has happened: those who wait look again, since a signal does not say what.

    `wait` is for any number of tasks, which do nothing between looking and waiting that awaits or makes others notify.
    `take` is for one task, whatever it does in between: what happens meanwhile is kept for it.

    Attributes:
        coming: set the next time. Who must do something between looking and waiting keeps it from before looking.
        is_kept: whether it was notified since it was last taken or forgotten.
    """

    def __init__(self) -> None:
        self.coming = anyio.Event()
        self.is_kept = False

    def notify(self) -> None:
        """It has happened: wake all who wait now. Who waits from now on waits for the next time."""
        self.is_kept = True
        self.coming.set()
        self.coming = anyio.Event()

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
