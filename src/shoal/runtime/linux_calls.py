"""Which of the calls that not every Unix has this system has: each is asked for where it is made, beside the other way.

The other ways are what macOS takes. With SHOAL_PORTABLE=1 in its environment a process takes them on Linux as well, and
so do all that it starts: tests force them so.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from enum import Enum
from pathlib import Path

FORCE_PORTABLE = "SHOAL_PORTABLE"
"""Environment variable; see above. It is no key of the configuration."""


class LinuxCall(Enum):
    """A call, or a family of calls that come together, and what is done without it."""

    PROC = "/proc"  # psutil
    MEMFD = "memfd_create(2), with seals"  # named files, which are copied from; vectors are sent
    PIDFD = "pidfd_open(2)"  # a pipe that the process itself holds, and looking again and again
    PRCTL = "prctl(2)"  # the lifeline, and the tag in the environment
    WAITID = "waitid(2), without reaping"  # waitpid(2)
    PEER_CREDENTIALS = "SO_PEERCRED"  # getpeereid(3), or the socket's mode alone
    EXCHANGE = "renameat2(2) with RENAME_EXCHANGE"  # two renames
    FILE_MEMORY = "posix_fallocate(3), and madvise(2) of mapped files"  # all vectors stay in memory
    CACHE_ADVICE = "posix_fadvise(2)"  # nothing: what is read back may come from memory
    READ_CACHED = "preadv2(2) with RWF_NOWAIT"  # a thread reads, which may wait
    AFFINITY = "sched_getaffinity(2)"  # all processors
    LONG_TURNS = "sched_setattr(2)"  # turns as the system has them
    INTERFACE_ADDRESS = "the ioctl SIOCGIFADDR of netdevice(7)"  # psutil
    SPAWN_SESSION = "posix_spawn(3) into a new session"  # fork and exec


def has(call: LinuxCall) -> bool:
    """Return whether this system has a call, and a process of this environment may use it."""
    return call in available_calls()


@functools.cache
def available_calls() -> frozenset[LinuxCall]:
    """Return all that this system has; looked up once, since neither it nor the environment changes."""
    if os.environ.get(FORCE_PORTABLE) == "1":
        return frozenset()
    is_linux = sys.platform == "linux"
    has_proc = is_linux and Path("/proc/self/stat").exists()
    found = {
        LinuxCall.PROC: has_proc,
        LinuxCall.MEMFD: has_proc and hasattr(os, "memfd_create"),
        LinuxCall.PIDFD: is_linux and _has_pidfd(),
        LinuxCall.PRCTL: is_linux,
        LinuxCall.WAITID: hasattr(os, "waitid"),
        LinuxCall.PEER_CREDENTIALS: is_linux,
        LinuxCall.EXCHANGE: is_linux,
        LinuxCall.FILE_MEMORY: is_linux,
        LinuxCall.CACHE_ADVICE: hasattr(os, "posix_fadvise"),
        LinuxCall.READ_CACHED: hasattr(os, "RWF_NOWAIT"),
        LinuxCall.AFFINITY: hasattr(os, "sched_getaffinity"),
        LinuxCall.LONG_TURNS: is_linux,
        LinuxCall.INTERFACE_ADDRESS: is_linux,
        LinuxCall.SPAWN_SESSION: is_linux,
    }
    return frozenset(call for call, is_there in found.items() if is_there)


def _has_pidfd() -> bool:
    if not (hasattr(os, "pidfd_open") and hasattr(os, "P_PIDFD") and hasattr(signal, "pidfd_send_signal")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False  # Linux before 5.3, or a sandbox that forbids it
    return True
