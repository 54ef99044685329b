"""How many files and connections a process may have open, and what to say when that is not enough."""

from __future__ import annotations

import errno
import resource
from typing import Final

WANTED: Final = 65536
"""Connections, pools and logs need far fewer; a usual soft limit of 1024 is fewer than the connections alone may be."""


def raise_file_limit() -> int:
    """Allow this process, and those that it starts, as many open files as it may ask for; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def hint(error: BaseException) -> str:
    """Return what to do about an error that says that no more files may be opened; empty for every other one."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f": this process may have {limit} files and connections open; allow more with `ulimit -n {WANTED}`"
