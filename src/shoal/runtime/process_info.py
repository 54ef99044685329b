"""What the system says about processes: parents, sessions, memory, age; from /proc, or from psutil."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.runtime import proc_files
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.proc_files import ProcessStat


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What a process and all its descendants take together."""

    num_processes: int
    pss_bytes: int


def _source():
    """Return the module that knows; of psutil Linux has no need."""
    if has(LinuxCall.PROC):
        return proc_files
    from shoal.runtime import by_psutil

    return by_psutil


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None if there is no such process."""
    return _source().read_stat(pid)


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, all its threads together, to a tick (10 ms); 0 if it is gone."""
    return _source().cpu_s(pid)


def thread_cpu_s(pid: int) -> list[float]:
    """Return the processor time of each living thread of a process, to a tick (10 ms); empty if it is gone."""
    return _source().thread_cpu_s(pid)


def descendants(pid: int) -> list[ProcessStat]:
    """Return all living and unreaped descendants of a process, parents before their children."""
    children: dict[int, list[ProcessStat]] = {}
    for each in _source().all_pids():
        stat = read_stat(each)
        if stat is not None:
            children.setdefault(stat.parent_pid, []).append(stat)
    found: list[ProcessStat] = []
    pending = [pid]
    while pending:
        direct = children.get(pending.pop(), [])
        found.extend(direct)
        pending.extend(stat.pid for stat in direct)
    return found


def has_environment(pid: int, entry: str) -> bool:
    """Return whether a process was started with `entry` ("NAME=value") in its environment; False when unreadable."""
    return entry.encode() in _source().environment(pid)


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, or what it shows instead; empty if it is gone."""
    return _source().command_line(pid)


def with_environment(entry: str) -> list[int]:
    """Return all processes that were started with `entry` in their environment, wherever they hang in the tree."""
    return [pid for pid in _source().all_pids() if has_environment(pid, entry)]


def pss_bytes(pid: int) -> int:
    """Return the memory of a process in bytes, a page that n share counted 1/n where the system says that; 0: gone."""
    return _source().share_bytes(pid)


def resident_bytes() -> int:
    """Return the memory of this process that is in use now, shared pages included; 0 where the system does not say."""
    return _source().resident_bytes()


def tree_usage(pid: int) -> TreeUsage:
    """Return the number and the memory of a process and its descendants; ended processes do not count."""
    living = [stat.pid for stat in descendants(pid) if not stat.has_ended]
    return TreeUsage(1 + len(living), sum(pss_bytes(each) for each in [pid, *living]))


def process_age_s(pid: int) -> float:
    """Return the seconds since a process was started, to 10 ms; 0 if that is not known.

    Unlike a clock read at the first line of a program, this counts the interpreter's own start as well.
    """
    stat = read_stat(pid)
    return 0.0 if stat is None else _source().now_s() - stat.started_s


def thread_names() -> list[str]:
    """Return a name for each thread of this process as the kernel counts them, native ones included."""
    return _source().thread_names()
