"""A test that waits in vain fails before the time limit ends its process, and one that hangs all the same says where.

The limit itself sees threads, and no coroutine.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import sys
import threading
from collections.abc import Generator

import pytest
from _pytest.capture import CaptureManager

BEFORE_S = 5.0
"""How long before the limit it is said, in seconds."""

WAIT = 0.8
"""The part of the limit that a test's own coroutine has."""

_timer = pytest.StashKey[threading.Timer]()
_limit_s = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings) -> None:
    """Start the clock of a test; the plugin's own starts as well."""
    timer = threading.Timer(max(settings.timeout - BEFORE_S, 0.0), _say, (item, settings.timeout))
    timer.name = f"pytest_timeout said of {item.nodeid}"  # the check for threads left behind knows this name
    timer.daemon = True
    item.stash[_timer] = timer
    item.stash[_limit_s] = settings.timeout
    timer.start()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """Stop the clock of a test that has ended."""
    if _timer in item.stash:
        item.stash[_timer].cancel()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Cancel a coroutine that takes too long: nothing in it needs a limit of its own so as not to hang."""
    test = pyfuncitem.obj
    limit_s = pyfuncitem.stash.get(_limit_s, 0.0)
    if limit_s and inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def bounded(**fixtures: object) -> None:
            # No cancel scope: endpoints that a test opens through its fixtures are closed after it.
            async with asyncio.timeout(WAIT * limit_s):
                await test(**fixtures)

        pyfuncitem.obj = bounded
    return (yield)


def _say(item: pytest.Item, limit_s: float) -> None:
    # Everything in one piece and past the capture: the process ends soon after, and other workers write as well.
    tasks = [o for o in gc.get_objects() if isinstance(o, asyncio.Task) and not o.done()]
    lines = [f"\n{item.nodeid} hangs (limit {limit_s:g} s); its tasks:"]
    for task in tasks:
        lines.append(f"  {task.get_name()}: {task.get_coro()!r}")
        lines.extend(f"    {f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}" for f in task.get_stack())
    capture = item.config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    with capture.global_and_fixture_disabled():
        print("\n".join(lines), file=sys.__stderr__, flush=True)
