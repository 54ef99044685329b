"""What Linux says about processes: parents, sessions, memory, age; read from /proc, without psutil.

Where there is no /proc (macOS) nothing is known: lists are empty and numbers are zero.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat (proc_pid_stat(5)) that shoal reads.

    Attributes:
        state: one letter; "Z" for a process that has ended and is not reaped yet.
        parent_pid: the nearest subreaper once the parent has ended.
        session: which its children inherit.
        started_after_boot_s: when it started, in seconds after the machine did.
        args_start, args_end: addresses of its command line in its own memory; 0 where the kernel hides them.
    """

    pid: int
    state: str
    parent_pid: int
    session: int
    started_after_boot_s: float
    args_start: int
    args_end: int


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What a process and all its descendants take together."""

    num_processes: int
    pss_bytes: int


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = _fields(text)
    return ProcessStat(
        pid=pid,
        state=fields[0],
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        started_after_boot_s=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        args_start=int(fields[45]),
        args_end=int(fields[46]),
    )


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, all its threads together, to a tick (10 ms); 0 if it is gone."""
    return _cpu_s(_PROC / str(pid) / "stat")


def thread_cpu_s(pid: int) -> list[float]:
    """Return the processor time of each living thread of a process, to a tick (10 ms); empty if it is gone."""
    return [_cpu_s(path / "stat") for path in (_PROC / str(pid) / "task").glob("*")]


def _fields(stat: str) -> list[str]:
    # The name stands in parentheses and may itself contain parentheses: what follows the last one is regular.
    return stat[stat.rindex(")") + 2 :].split()


def _cpu_s(path: Path) -> float:
    try:
        fields = _fields(path.read_text(errors="replace"))
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[ProcessStat]:
    """Return all living and unreaped descendants of a process, parents before their children."""
    children: dict[int, list[ProcessStat]] = {}
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        stat = read_stat(int(entry.name)) if entry.name.isdecimal() else None
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
    try:
        return entry.encode() in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, or what it shows instead; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def with_environment(entry: str) -> list[int]:
    """Return all processes that were started with `entry` in their environment, wherever they hang in the tree."""
    pids = [int(path.name) for path in _PROC.iterdir() if path.name.isdecimal()] if _PROC.is_dir() else []
    return [pid for pid in pids if has_environment(pid, entry)]


def pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process in bytes: a page that n share counts 1/n; 0 if it is gone."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def resident_bytes() -> int:
    """Return the memory of this process that is in use now, shared pages included; 0 where the system does not say."""
    try:
        pages = int((_PROC / "self" / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def tree_usage(pid: int) -> TreeUsage:
    """Return the number and the memory of a process and its descendants; ended processes do not count."""
    living = [stat.pid for stat in descendants(pid) if stat.state != "Z"]
    return TreeUsage(1 + len(living), sum(pss_bytes(each) for each in [pid, *living]))


def process_age_s(pid: int) -> float:
    """Return the seconds since a process was started, to 10 ms; 0 if that is not known.

    Unlike a clock read at the first line of a program, this counts the interpreter's own start as well.
    """
    stat = read_stat(pid)
    if stat is None:
        return 0.0
    return float((_PROC / "uptime").read_text().split()[0]) - stat.started_after_boot_s


def thread_names() -> list[str]:
    """Return the names of the threads of this process as the kernel counts them, native ones included."""
    tasks = _PROC / "self" / "task"
    if not tasks.is_dir():
        return []
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()]
