"""Waiting for the end of a process in the event loop, without taking its exit status."""

from __future__ import annotations

import os

import anyio


async def process_ended(pid: int) -> None:
    """Return when a process has ended.

    Args:
        pid: of a child that is not reaped yet, so that no other process can have the number.

    Raises:
        ProcessLookupError: There is no such process.
    """
    pidfd = os.pidfd_open(pid)
    try:
        await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
