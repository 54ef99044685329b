"""Anonymous files of a fixed size, to share memory between processes.

A memfd has no name that a killed process could leave behind; another process of the same user opens it as
`/proc/<pid>/fd/<n>` while its owner has it open. Its size is sealed, so that reading a mapping of it can never fault.
"""

from __future__ import annotations

import fcntl
import os

from shoal.errors import InvariantViolation
from shoal.runtime.linux_calls import LinuxCall, has


def has_memfd() -> bool:
    """Return whether this system has anonymous files that other processes can open."""
    return has(LinuxCall.MEMFD)


def sealed_memfd(name: str, num_bytes: int) -> int:
    """Return the descriptor of a new anonymous file; the caller owns it.

    Args:
        name: shown in /proc, for people.

    Raises:
        InvariantViolation: the system has none; see `has_memfd`.
        OSError: the system refuses another file, or one of this size.
    """
    if not has_memfd():
        raise InvariantViolation(f"{name}: this system has no memfd")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
