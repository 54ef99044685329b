"""What computes on this machine, by name and number: for benchmarks, and to know a machine again. No torch.

A machine is known again in two ways: as one of a kind that computes the same bits, and as this very one.

The bits of a computation depend on the machine's type and on the versions of the programs.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shoal.runtime.linux_calls import LinuxCall, has

_LIBRARIES = ("shoal", "torch", "numpy")
_ROOT = Path("/")
_NAME_CHARACTERS = 16


def processor_name(root: Path = _ROOT) -> str:
    """Return the name of the processor, or of its architecture if the system names only that.

    Args:
        root: of the file system that holds /proc.
    """
    path = root / "proc/cpuinfo"
    if name := _field(path, "model name"):
        return name
    # ARM's have numbers instead, of who designed the core and which it is.
    numbers = [_field(path, name) for name in ("CPU implementer", "CPU part")]
    return " ".join([platform.machine(), *(number for number in numbers if number)])


def usable_processors() -> set[int]:
    """Return the logical processors on which this process may run, by number."""
    return os.sched_getaffinity(0) if has(LinuxCall.AFFINITY) else set(range(os.cpu_count() or 1))


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


def machine_type() -> dict[str, str]:
    """Return what is the same on all machines that compute the same bits: processor and architecture."""
    return {"processor": processor_name(), "architecture": platform.machine()}


def machine_name(root: Path = _ROOT) -> str:
    """Return a name that all processes of this machine share and other machines do not, until it is started again.

    Containers with a network of their own count as machines, because they reach each other as machines do. The name
    does not reveal what it was made from: systemd asks that the machine id stay secret.

    Args:
        root: of the file system that holds /etc and /proc.
    """
    told = _told(root, "etc/machine-id", "proc/sys/kernel/random/boot_id")
    with suppress(OSError):
        told.append(os.readlink(root / "proc/self/ns/net"))
    # Elsewhere than on Linux its name has to do.
    told = told or [platform.node()]
    return _name_of("shoal machine 1", *told)


def lasting_machine_name(root: Path = _ROOT) -> str:
    """Return a name that this machine keeps when it is started again.

    One that is made of a copy of its disk has another, unless the machine id and what it is called were left as they
    are. Containers mostly have no machine id, and are known by what they are called.

    Args:
        root: of the file system that holds /etc.
    """
    return _name_of("shoal lasting machine 1", platform.node(), *_told(root, "etc/machine-id"))


def _told(root: Path, *paths: str) -> list[str]:
    """Return what stands in those of the files that can be read."""
    told: list[str] = []
    for path in paths:
        with suppress(OSError):
            told.append((root / path).read_text().strip())
    return told


def _name_of(*told: str) -> str:
    return hashlib.sha3_256("\n".join(told).encode()).hexdigest()[:_NAME_CHARACTERS]


def program_versions() -> dict[str, str]:
    """Return the versions of the programs that decide the bits of a run, by name."""
    return {**{name: version(name) for name in _LIBRARIES}, "python": platform.python_version()}


def installed_version(program: str) -> str | None:
    """Return the version of a program that pip knows; None: it is not installed."""
    try:
        return version(program)
    except PackageNotFoundError:
        return None


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
