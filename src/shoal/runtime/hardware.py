"""What computes on this machine, by name: for the reader of a benchmark, and to know a machine again. No torch.

A machine is known again in two ways: as one of a kind that computes the same bits, and as this very one.

The bits of a computation depend on the machine's type and on the versions of the programs.
"""

from __future__ import annotations

import hashlib
import os
import platform
from contextlib import suppress
from importlib.metadata import version
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
    told: list[str] = []
    for path in ("etc/machine-id", "proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            told.append((root / path).read_text().strip())
    with suppress(OSError):
        told.append(os.readlink(root / "proc/self/ns/net"))
    # Elsewhere than on Linux its name has to do.
    told = told or [platform.node()]
    return hashlib.sha3_256("\n".join(["shoal machine 1", *told]).encode()).hexdigest()[:_NAME_CHARACTERS]


def program_versions() -> dict[str, str]:
    """Return the versions of the programs that decide the bits of a run, by name."""
    return {**{name: version(name) for name in _LIBRARIES}, "python": platform.python_version()}


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
