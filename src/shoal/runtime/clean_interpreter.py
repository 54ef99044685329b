"""Starting a module in a clean interpreter, which has of this process the module path and what is handed over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_KEEP_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""For glibc (mallopt(3)): a thread that computes allocates the same tensors again and again, and memory that was given
back to the kernel in between has to be mapped and cleared page by page. Threads share one arena, since those of their
own are given back in parts of 64 MB whatever is said. 32 MiB is the most that can be kept."""


def allocator_settings() -> dict[str, str]:
    """Return the environment in which a process that trains keeps freed memory; what the user has set stays."""
    return {name: os.environ.get(name, value) for name, value in _KEEP_FREED_MEMORY.items()}


def start_interpreter(
    module: str,
    arguments: Sequence[object],
    *,
    pass_fds: Sequence[int],
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, without waiting for it.

    It finds its modules where this process finds its own. Its standard input is empty.

    Args:
        pass_fds: descriptors that it inherits, under the same numbers.
        environment: added to this process's environment, and replaces variables of it.
        output: gets its output and its errors; None: they go where this process's go.
        new_session: keeps it out of reach of the terminal's Ctrl-C.

    Raises:
        OSError: the system refuses another process.
    """
    return subprocess.Popen(
        # -P keeps the working directory out of the module path, unless it is in ours.
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(sys.path)},
        pass_fds=pass_fds,
        start_new_session=new_session,
    )
