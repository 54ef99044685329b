"""How much memory of this host is free: what Linux has available, less where a control group allows less.

Where there is no /proc (macOS) psutil says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shoal.runtime.linux_calls import LinuxCall, has

_ROOT = Path("/")


class _Files(NamedTuple):
    """The names of a version of control groups; `reclaimable` is a line of `stat`: cache that makes room."""

    mount: str
    limit: str
    used: str
    reclaimable: str


_VERSION_1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that new processes may use before anything is swapped or killed; 0: not known.

    Args:
        root: of the file system that holds /proc and /sys.
    """
    if root == _ROOT and not has(LinuxCall.PROC):
        from shoal.runtime.by_psutil import available_bytes

        return available_bytes()
    available = _line(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return 0
    return max(1, min((available * 1024, *_allowances(root))))


def own_data_bytes() -> int:
    """Return the bytes of memory that this process has mapped for itself, as RLIMIT_DATA counts it; 0: not known."""
    return (_line(_ROOT / "proc/self/status", "VmData:") or 0) * 1024


def shortage(needed_bytes: int) -> str:
    """Say that this host has less free memory than is needed, as the end of a sentence; empty: it has it, or who knows.

    As in "has 12 MB of free memory, it needs 30 MB".
    """
    free_bytes = free_memory_bytes()
    if not free_bytes or needed_bytes <= free_bytes:
        return ""
    return f"has {free_bytes / 1e6:,.0f} MB of free memory, it needs {needed_bytes / 1e6:,.0f} MB"


def _allowances(root: Path) -> Iterator[int]:
    """Yield what each control group around this process leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            files = _VERSION_1 if controllers else _VERSION_2
            # Limits of outer groups hold as well. Inside a container the own group may be mounted at the top.
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                left = _left(root / files.mount / str(group).lstrip("/"), files)
                if left is not None:
                    yield left


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit, used = (folder / files.limit).read_text().strip(), int((folder / files.used).read_text())
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():
        return None  # "max"
    return int(limit) - used + (_line(folder / "memory.stat", files.reclaimable) or 0)


def _line(path: Path, name: str) -> int | None:
    """Return the number in the line of a file that begins with a name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), None)
