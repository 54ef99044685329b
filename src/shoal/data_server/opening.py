"""Says how far a data server is that does not serve yet, since many files, a slow disk or the hub may take long.

Who opens the data set, a library mostly, tells nothing meanwhile. So the files of a folder are counted beside, and what
is said otherwise, as of tokens that are made, goes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from shoal.clock import Clock
from shoal.data.source import DataSet
from shoal.events.base import Event
from shoal.events.data import DatasetOpening

FIRST_S: Final = 2.0
"""What is open before that, nothing is said of."""
_EVERY_S: Final = 5.0
_QUIET_S: Final = 8.0
"""Nobody else has said for so long how far it is."""


class OpeningProgress:
    """Says now and then that a data set is being opened.

    Args:
        dataset: Its name; the folder where it is one.
        show: Shows an event.
    """

    def __init__(self, dataset: str, show: Callable[[Event], None], clock: Clock) -> None:
        self._dataset, self._show, self._clock = dataset, show, clock
        self._folder = Path(dataset).expanduser()
        self._begun_s, self._told_s = clock.now_s(), float("-inf")
        self._files, self._is_counted, self._is_over = 0, False, False

    def told(self) -> None:
        """Somebody has said how far it is."""
        self._told_s = self._clock.now_s()

    async def through(self, open: Callable[[], DataSet]) -> DataSet:
        """Return what `open` returns, in a thread; meanwhile it is said. Raises what it raises, in a group."""
        opened: list[DataSet] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._say)
            # A download, or making tokens of text, may take long: stopping does not wait for it.
            opened.append(await anyio.to_thread.run_sync(open, abandon_on_cancel=True))
            tasks.cancel_scope.cancel()
        return opened[0]

    async def _say(self) -> None:
        await self._clock.sleep_s(FIRST_S)
        try:
            async with anyio.create_task_group() as tasks:
                is_folder = await anyio.to_thread.run_sync(self._folder.is_dir, abandon_on_cancel=True)
                if is_folder:
                    tasks.start_soon(self._count)
                while True:
                    now_s = self._clock.now_s()
                    if now_s - self._told_s >= _QUIET_S:
                        elapsed_s = round(now_s - self._begun_s)
                        files = self._files if is_folder else None
                        self._show(DatasetOpening(self._dataset, files, self._is_counted, elapsed_s))
                    await self._clock.sleep_s(_EVERY_S)
        finally:
            self._is_over = True

    async def _count(self) -> None:
        await anyio.to_thread.run_sync(self._count_files, abandon_on_cancel=True)

    def _count_files(self) -> None:
        for _, _, names in os.walk(self._folder):
            self._files += len(names)
            if self._is_over:
                return
        self._is_counted = True
