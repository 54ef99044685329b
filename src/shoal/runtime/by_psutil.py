"""What psutil says about this host, its processes and its memory, for systems without the calls of Linux.

Imported only there; on Linux psutil need not be installed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from shoal.clock import SystemClock
from shoal.runtime.proc_files import ProcessStat

_Answer = TypeVar("_Answer")

_LETTERS = {
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_TRACING_STOP: "t",
    psutil.STATUS_RUNNING: "R",
}


def all_pids() -> list[int]:
    """Return the numbers of all processes."""
    return psutil.pids()


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None if there is no such process; its times are seconds since 1970."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state, parent_pid, started_s = process.status(), process.ppid(), process.create_time()
    except (psutil.Error, OSError):
        return None
    session = 0
    with suppress(OSError):
        session = os.getsid(pid)
    return ProcessStat(pid, _LETTERS.get(state, "S"), parent_pid, session, started_s, 0, 0)


def now_s() -> float:
    """Return the time on the clock of `ProcessStat.started_s`."""
    return SystemClock().unix_s()


def environment(pid: int) -> frozenset[bytes]:
    """Return the entries of a process's environment; none when unreadable."""
    found = _said(pid, psutil.Process.environ, {})
    return frozenset(os.fsencode(f"{name}={value}") for name, value in found.items())


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if it is gone."""
    return _said(pid, psutil.Process.cmdline, [])


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, all its threads together; 0 if it is gone."""
    times = _said(pid, psutil.Process.cpu_times, None)
    return 0.0 if times is None else times.user + times.system


def thread_cpu_s(pid: int) -> list[float]:
    """Return the processor time of each thread; empty if it is gone, or another process whose threads are private."""
    threads = _said(pid, psutil.Process.threads, [])
    return [thread.user_time + thread.system_time for thread in threads]


def share_bytes(pid: int) -> int:
    """Return the resident memory of a process: how much of it others share is not known; 0 if it is gone."""
    memory = _said(pid, psutil.Process.memory_info, None)
    return 0 if memory is None else memory.rss


def resident_bytes() -> int:
    """Return the memory of this process that is in use now, shared pages included."""
    return share_bytes(os.getpid())


def thread_names() -> list[str]:
    """Return something for each thread of this process; names are not known."""
    return [f"thread {thread.id}" for thread in psutil.Process().threads()]


def available_bytes() -> int:
    """Return the memory of this host that new processes may use before anything is swapped."""
    return psutil.virtual_memory().available


def own_addresses(family: socket.AddressFamily) -> list[str]:
    """Return the addresses of this host's interfaces that are of one kind."""
    addresses = [address for found in psutil.net_if_addrs().values() for address in found]
    return [address.address for address in addresses if address.family == family]


def _said(pid: int, ask: Callable[[psutil.Process], _Answer], otherwise: _Answer) -> _Answer:
    """Return what a process says, or something else where it is gone, or another user's."""
    try:
        return ask(psutil.Process(pid))
    except (psutil.Error, OSError):
        return otherwise
