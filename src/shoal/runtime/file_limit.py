"""How many files and connections a process may have open."""

from __future__ import annotations

import resource

from shoal.file_thread import WANTED_FILES


def raise_file_limit() -> int:
    """Allow this process, and those that it starts, as many open files as it may ask for; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
