"""The one thread that computes: functions run on it in the order in which they were handed over.

Everything that touches the device goes through here, so the event loop stays free and device state needs no locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

import anyio

from shoal.events.base import emit
from shoal.events.processes import DeviceThreadFailedAfterCancel

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Args = TypeVarTuple("_Args")


class DeviceThread:
    """First in, first out; starts its thread with the first call, so it may be made before a fork.

    Use it as an async context, or call `close`.
    """

    def __init__(self, initialiser: Callable[[], None] | None = None, *, name: str = "device") -> None:
        """Prepare the thread.

        Args:
            initialiser: called once in the thread before anything else, to set what is kept per thread (for torch the
                number of threads, without which CPU steps are 10 to 50 times slower). If it raises, every `run` raises
                the same.
        """
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=initialiser)
        self._closed = False

    async def run(self, function: Callable[[*_Args], _Result], *args: *_Args) -> _Result:
        """Call `function(*args)` in the device thread and return what it returns.

        If the waiting task is cancelled, a call that has not begun never will, and one that has begun is waited for:
        after `run` has ended, either way, the function does not use its arguments.

        Raises:
            Exception: whatever `function` raises.
        """
        return await self.begin(function, *args)

    def begin(self, function: Callable[[*_Args], _Result], *args: *_Args) -> Coroutine[Any, Any, _Result]:
        """Hand a call over now; await what is returned, which is as `run`, soon."""
        return self._ended(self._executor.submit(_called, function, args))

    async def _ended(self, call: Future[_Result]) -> _Result:
        waiter = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not call.cancel():
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([waiter])
                if not waiter.cancelled() and (error := waiter.exception()) is not None:
                    emit(_logger, DeviceThreadFailedAfterCancel(), error=error)
            raise

    async def aclose(self) -> None:
        """Wait for the calls that were handed over, without blocking the event loop, and end the thread."""
        if self._closed:
            return
        # With a broken initialiser nothing was run and there is nothing to wait for.
        with anyio.CancelScope(shield=True), contextlib.suppress(BrokenExecutor):
            await self.run(_nothing)
        self.close()

    def close(self) -> None:
        """Drop the calls that have not begun, block until the current one is done, and end the thread."""
        self._closed = True
        self._executor.shutdown(cancel_futures=True)

    async def __aenter__(self) -> DeviceThread:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()


def _called(function: Callable[[*_Args], _Result], args: tuple[*_Args]) -> _Result:
    """Call it. No future takes a StopIteration, as a bare `next` may raise: who waits would go on waiting."""
    try:
        return function(*args)
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised on the device thread") from error


def _nothing() -> None:
    """Be the last call in the queue."""
