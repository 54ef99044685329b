"""Limits that a process sets itself before it works on what strangers have made, which may ask for anything.

Whoever does that is a child (`runtime.child`), or a command of a user: it ends, or says why it cannot go on, and others
have what they need.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, NamedTuple

from shoal.errors import ChildDied, StorageError
from shoal.runtime.memory import free_memory_bytes, own_data_bytes

_LEAST_BYTES: Final = 4 << 30
_SHARE: Final = 0.75
_GB: Final = 1e9


@contextmanager
def within_free_memory() -> Generator[None]:
    """Take no more memory than most of what is free now, beside what this process has: what asks for more gets an
    error, or ends the process, where a library knows no such error (tokenizers).

    Raises:
        StorageError: More was asked for.
    """
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    free_bytes = free_memory_bytes()
    wanted_bytes = max(_LEAST_BYTES, int(_SHARE * free_bytes))
    bounds = (own_data_bytes() + wanted_bytes, *limits)
    most_bytes = min(each for each in bounds if each != resource.RLIM_INFINITY)
    if free_bytes:  # else it is not known
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, limits[1]))
    try:
        yield
    except MemoryError as error:
        raise StorageError(
            f"what is read unpacks to more than the {wanted_bytes / _GB:.1f} GB of memory that a process may take for "
            "it: leave out the file that does, or free memory on this host if it is to be so large"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


class Timer(NamedTuple):
    """What counts the computing of a process, and the signal by which that ends: the parent tells two by it."""

    which: int
    ends_by: signal.Signals


USER_TIME: Final = Timer(signal.ITIMER_VIRTUAL, signal.SIGVTALRM)
CPU_TIME: Final = Timer(signal.ITIMER_PROF, signal.SIGPROF)


@contextmanager
def ends_after(cpu_s: float, timer: Timer = USER_TIME) -> Generator[None]:
    """End this process, by a signal, if what is in the context computes for longer, also within a call to a library.

    Its own computing counts, of all threads, so that a busy host is no reason. The parent tells it from other deaths by
    `is_endless`. Of contexts within each other with one timer the inner one counts as long as it lasts.
    """
    outer_s, _ = signal.setitimer(timer.which, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(timer.which, outer_s)


def is_endless(died: ChildDied, timer: Timer = USER_TIME) -> bool:
    """Whether a child was ended by `ends_after`."""
    return died.code == -timer.ends_by
