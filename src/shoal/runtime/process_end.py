"""Waiting for the end of a process, without taking its exit status.

Where there are no pidfds this looks again and again: nothing that every Unix has tells of the end of any process.
"""

from __future__ import annotations

import os
import select

import anyio

from shoal.clock import SystemClock
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.process_info import read_stat

_LOOK_S = 0.02


async def process_ended(pid: int) -> None:
    """Return when a process has ended.

    Args:
        pid: of a child that is not reaped yet, so that no other process can have the number.

    Raises:
        ProcessLookupError: There is no such process.
    """
    if not has(LinuxCall.PIDFD):
        if read_stat(pid) is None:
            raise ProcessLookupError(f"there is no process {pid}")
        while _lives(pid):
            await SystemClock().sleep_s(_LOOK_S)
        return
    pidfd = os.pidfd_open(pid)
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)


def wait_until_ended(pid: int) -> None:
    """Return when a process has ended, or if there is none; blocks."""
    if not has(LinuxCall.PIDFD):
        while _lives(pid):
            select.select([], [], [], _LOOK_S)
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)


def _lives(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and not stat.has_ended
