"""The machine that a benchmark ran on: what somebody else needs to know to judge its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shoal.runtime.hardware import processor_name, usable_processors

_ROOT = Path("/")
_LIBRARIES = ("torch", "hivemind", "numpy", "uvloop")


def num_usable_cores(root: Path = _ROOT) -> int:
    """Return how many loops can run at full speed at the same time in this process and its children.

    The threads of one core count once, because they share it. A control group may allow less than there is (`docker run
    --cpus`).

    Args:
        root: of the file system that holds /proc and /sys.
    """
    cores = {_siblings(root, cpu) for cpu in usable_processors()}
    return max(1, min((len(cores), *_quotas(root))))


def _siblings(root: Path, cpu: int) -> str:
    """Return a name for the core that a logical processor is a thread of."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> Iterator[int]:
    """Yield the whole cores that control groups, of either version, allow at most."""
    with suppress(OSError, ValueError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        yield int(quota) // int(period)
    group = root / "sys/fs/cgroup/cpu"
    with suppress(OSError, ValueError):
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        if quota_us > 0:  # -1: no limit
            yield quota_us // int((group / "cpu.cfs_period_us").read_text())


def describe_machine() -> dict[str, object]:
    """Return cores, processor, memory, versions and load, by name."""
    return {
        "cores": num_usable_cores(),
        "processor": processor_name(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
