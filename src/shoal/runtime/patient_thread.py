"""Work in a thread that has to be done, also where the system has no thread left for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio.to_thread

from shoal.clock import Backoff, SystemClock

_MAX_TRIES = 30
"""With the pauses between them, for about half a minute."""
_REFUSED = "can't start new thread"

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


async def run_in_thread(function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
    """Call `function(*args)` in a thread and return what it returns. Not for what may not be called twice.

    Raises:
        RuntimeError: there is no thread for it, for long.
        Exception: whatever `function` raises.
    """
    backoff = Backoff(first_s=0.1, max_s=2.0)
    for _ in range(_MAX_TRIES - 1):
        try:
            return await anyio.to_thread.run_sync(function, *args)
        except RuntimeError as error:
            if str(error) != _REFUSED:
                raise
        await backoff.wait(SystemClock())
    return await anyio.to_thread.run_sync(function, *args)
