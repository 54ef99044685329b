"""Locks that one process of this host holds at a time; its end gives them up, however it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def lock(path: Path, *, waits: bool = True) -> int:
    """Lock a file, which is made if it is not there; returns the descriptor that holds the lock until it is closed.

    Args:
        waits: for the process that has the lock.

    Raises:
        BlockingIOError: another process has the lock, and it is not to be waited for.
        OSError: the file cannot be made.
    """
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.pop_all()
    return descriptor


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Generator[None]:
    """Hold the lock of a file for a while; see `lock`."""
    descriptor = lock(path, waits=waits)
    try:
        yield
    finally:
        os.close(descriptor)
