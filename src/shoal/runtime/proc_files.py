"""What Linux says about processes, read from /proc (proc(5)): for `runtime.process_info`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/<pid>/stat (proc_pid_stat(5)) that shoal reads.

    Attributes:
        state: one letter; which `has_ended` and `is_stopped` know.
        parent_pid: the nearest subreaper once the parent has ended.
        session: which its children inherit.
        started_s: when it started, on a clock of the system's that is never set: seconds after the machine did, and
            without /proc since 1970. It tells a process from an earlier one of the same number.
        args_start, args_end: addresses of its command line in its own memory; 0 where they are not known.
    """

    pid: int
    state: str
    parent_pid: int
    session: int
    started_s: float
    args_start: int
    args_end: int

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and is not reaped yet."""
        return self.state == "Z"

    @property
    def is_stopped(self) -> bool:
        """Whether it stands still, by a signal or a debugger, until somebody lets it go on."""
        return self.state in "Tt"


def all_pids() -> list[int]:
    """Return the numbers of all processes."""
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()]


def read_stat(pid: int) -> ProcessStat | None:
    """Return the state of a process, or None if there is no such process."""
    try:
        text = _read(pid, "stat").decode(errors="replace")
    except OSError:
        return None
    fields = _fields(text)
    return ProcessStat(
        pid=pid,
        state=fields[0],
        parent_pid=int(fields[1]),
        session=int(fields[3]),
        started_s=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        args_start=int(fields[45]),
        args_end=int(fields[46]),
    )


def now_s() -> float:
    """Return the time on the clock of `ProcessStat.started_s`."""
    return float((_PROC / "uptime").read_text().split()[0])


def environment(pid: int) -> frozenset[bytes]:
    """Return the entries of the environment with which a process was started; none when unreadable."""
    try:
        # Where a program has put another environment in the place of a longer one, thousands of zeros follow.
        return frozenset(_read(pid, "environ").rstrip(b"\0").split(b"\0"))
    except OSError:
        return frozenset()


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command line, or what it shows instead; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def cpu_s(pid: int) -> float:
    """Return the processor time of a process, all its threads together, to a tick (10 ms); 0 if it is gone."""
    return _cpu_s(_PROC / str(pid) / "stat")


def thread_cpu_s(pid: int) -> list[float]:
    """Return the processor time of each living thread of a process, to a tick (10 ms); empty if it is gone."""
    return [_cpu_s(path / "stat") for path in (_PROC / str(pid) / "task").glob("*")]


def share_bytes(pid: int) -> int:
    """Return the proportional set size of a process: a page that n share counts 1/n; 0 if it is gone."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def resident_bytes() -> int:
    """Return the memory of this process that is in use now, shared pages included; 0 if the system does not say."""
    try:
        pages = int((_PROC / "self" / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def thread_names() -> list[str]:
    """Return the names of the threads of this process as the kernel counts them, native ones included."""
    return [(task / "comm").read_text().strip() for task in (_PROC / "self" / "task").iterdir()]


def _read(pid: int, name: str) -> bytes:
    # Of all processes at a time: a `Path` that is put together takes half of the time for each.
    with open(f"{_PROC}/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _fields(stat: str) -> list[str]:
    # The name stands in parentheses and may itself contain parentheses: what follows the last one is regular.
    return stat[stat.rindex(")") + 2 :].split()


def _cpu_s(path: Path) -> float:
    try:
        fields = _fields(path.read_text(errors="replace"))
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
