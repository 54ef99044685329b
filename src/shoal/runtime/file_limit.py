"""How many files and connections a process may have open, and which of them are for files alone.

    0 1 2 ... connections and files ...     limit - kept | files ...    limit

The system gives out the lowest number that is free. So a connection that gets one of the last numbers has taken what
this process will need to write down a record, or to start its DHT daemon again: it is closed.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from shoal.file_thread import WANTED_FILES

_KEPT_FILES: Final = 32
_MOST_SHARE_KEPT: Final = 4
_LEAST_FILES: Final = 128
"""What a process opens at its start, and for a few connections: one that can never have as many ends, and says why."""


def raise_file_limit() -> int:
    """Allow this process, and those that it starts, as many open files as it may ask for; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def is_for_files(descriptor: int) -> bool:
    """Whether a descriptor is one of the last that this process may have: no connection may keep it.

    The limit may have been changed from outside (`prlimit`), so it is asked each time.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or (hard != resource.RLIM_INFINITY and hard < _LEAST_FILES):
        return False
    return descriptor >= limit - min(_KEPT_FILES, limit // _MOST_SHARE_KEPT)


def takes_connections() -> bool:
    """Whether another connection would get a descriptor that it may keep."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(descriptor)
    return not is_for_files(descriptor)
