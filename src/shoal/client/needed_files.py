"""What a run cannot go on without on the disk: where that takes nothing, it waits for a while and tries again.

    write --> done
      '-- StorageError --> said once --> pause --> write ...     done: said; `_PATIENCE_S` later still not: StorageError

A disk that is full, read-only or away for a moment so costs a run that time, and nothing that was learnt. Nothing tells
when there is space again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import anyio.lowlevel

from shoal.client.ledger import Ledger
from shoal.clock import Backoff, Clock, Deadline
from shoal.errors import StorageError
from shoal.events.hosts import DiskTakesAgain
from shoal.events.run import DiskTakesNothing

_PATIENCE_S: Final = 1800.0
"""So long has somebody time to free space; servers keep what they have learnt meanwhile."""
_FIRST_PAUSE_S, _PAUSE_S = 0.2, 5.0

_Result = TypeVar("_Result")


@dataclass(eq=False, repr=False)
class NeededFiles:
    """Of one client."""

    ledger: Ledger
    clock: Clock
    _is_failing: bool = field(default=False, init=False)

    async def written(self, write: Callable[[], Awaitable[_Result]], patience_s: float = _PATIENCE_S) -> _Result:
        """Return what `write` returns, which is called until the disk takes what it writes. Who is cancelled before it
        is called again writes nothing.

        Raises:
            StorageError: the disk has taken nothing for so long.
        """
        deadline, pauses = Deadline.after(self.clock, patience_s), Backoff(_FIRST_PAUSE_S, _PAUSE_S)
        while True:
            try:
                result = await write()
            except StorageError as error:
                if deadline.expired():
                    raise
                if not self._is_failing:
                    self._is_failing = True
                    self.ledger.note(DiskTakesNothing(str(error), patience_s / 60))
            else:
                break
            await pauses.wait(self.clock)
            # A cancellation that comes when the pause is over is told only with the next wait, which may be none.
            await anyio.lowlevel.checkpoint_if_cancelled()
        if self._is_failing:
            self._is_failing = False
            self.ledger.note(DiskTakesAgain("the client"))
        return result
