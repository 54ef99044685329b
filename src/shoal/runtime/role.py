"""The inside of a role's process, from the fork to its exit code: event loop, signals, failure report.

A role is an async function `entry(payload, control)`. It configures its own logging, tells `control` a `RoleReady` once
it serves, and returns soon after `control.stopping` is set.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import cast

import anyio

from shoal import log
from shoal.errors import BootstrapError, ConfigError, ShoalError
from shoal.events.base import emit
from shoal.events.processes import RoleCrashed, RoleEndedByError
from shoal.file_thread import hint
from shoal.runtime.control_pipe import RoleControl, open_role_control
from shoal.runtime.file_limit import raise_file_limit
from shoal.runtime.launcher_messages import RoleFailed
from shoal.runtime.lifeline import watch_in_thread

_logger = logging.getLogger(__name__)

RoleEntry = Callable[[bytes, RoleControl], Awaitable[None]]
"""The function that is a role: takes its payload (opaque here) and its control pipe."""

EXIT_DONE, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2


def resolve_entry(entry: str) -> RoleEntry:
    """Return the function that "package.module:function" names, importing the module.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such function.
    """
    module_name, _, function_name = entry.partition(":")
    return cast(RoleEntry, getattr(importlib.import_module(module_name), function_name))


def run_role(entry: str, payload: bytes, control: socket.socket, lifeline_fd: int, run_dir: str) -> int:
    """Run a role in this process until it returns, fails or the lifeline is cut.

    Args:
        entry: "package.module:function" of an async function, see `RoleEntry`.
        control: connected Unix socket to the supervisor.
        lifeline_fd: read end of the lifeline.
        run_dir: directory that ends with the run; empty: there is none.

    Returns:
        The exit code: 0 done, 1 failed, 2 the user's error.
    """
    # What fails before the role has a log file of its own is found in its output.
    log.configure(entry.partition(":")[0], None, logging.ERROR, terminal=True)
    raise_file_limit()
    watch_in_thread(lifeline_fd, run_dir)
    return anyio.run(partial(_serve, entry, payload, control), backend_options={"use_uvloop": True})


async def _serve(entry: str, payload: bytes, control: socket.socket) -> int:
    async with open_role_control(control) as role_control:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, role_control.stopping.set)
        # Blocked since before the fork, so that a SIGTERM sent meanwhile is handled now and not lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            await resolve_entry(entry)(payload, role_control)
        except Exception as error:  # noqa: BLE001 - the edge of the process: whatever fails has to be logged and reported
            return _report(error, role_control)
        return EXIT_DONE


def _report(error: Exception, control: RoleControl) -> int:
    """Log why the role failed, tell the launcher, and return the exit code."""
    causes = list(leaves(error))
    known = [cause for cause in causes if isinstance(cause, ShoalError)]
    if len(known) == len(causes):
        emit(_logger, RoleEndedByError(type(known[0]).__name__, str(known[0])))
    else:
        emit(_logger, RoleCrashed(), error=error)
    first = causes[0]
    control.tell(RoleFailed(str(first) + hint(first), type(first).__name__))
    return EXIT_USER_ERROR if isinstance(first, ConfigError | BootstrapError) else EXIT_FAILED


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that task groups have wrapped into groups."""
    if isinstance(error, BaseExceptionGroup):
        for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from leaves(member)
    else:
        yield error
