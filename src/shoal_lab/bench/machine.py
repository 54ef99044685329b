"""The machine that a benchmark ran on: what somebody else needs to know to judge its figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from shoal.runtime.hardware import num_usable_cores, processor_name

_LIBRARIES = ("torch", "hivemind", "numpy", "uvloop")


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
