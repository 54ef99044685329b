"""Memory that lies in files without a name: of what nobody looks at, nothing has to be in a host's memory.

A file is mapped, and is gone with its mapping, however the process ends. Its room on the disk is taken at once: a disk
that is full later can stop nobody who writes. Nobody else can open the file, so nobody can cut it while it is mapped.

Pages that were read or written count as the process's memory until they are left. The file then has them: where the
host has memory that is free, from there, and else on the disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from bisect import bisect_right
from pathlib import Path
from typing import Final

from shoal.errors import InvariantViolation
from shoal.runtime.linux_calls import LinuxCall, has

_MOUNTS: Final = Path("/proc/self/mountinfo")
_IN_MEMORY: Final = ("tmpfs", "ramfs")
_SHARE: Final = 2
"""One in so many bytes of what is free: logs, checkpoints and others need room too."""


def file_room_bytes(folder: Path, num_sharers: int = 1, mounts: Path = _MOUNTS) -> int:
    """Return how many bytes each of so many processes may have in files there; 0: none, as where they would lie in
    memory all the same."""
    if not has(LinuxCall.FILE_MEMORY) or _is_in_memory(folder, mounts):
        return 0
    try:
        return shutil.disk_usage(folder).free // _SHARE // num_sharers
    except OSError:
        return 0


def give_back_freed() -> None:
    """Give the system what was freed in this process and is kept for what comes (`runtime.clean_interpreter`), where
    the C library can (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FileMemory:
    """Mapped files of one process; any thread may call it.

    Args:
        folder: On which disk they lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # By where they begin, which `_starts` has in order.
        self._mapped: dict[int, weakref.ref[mmap.mmap]] = {}
        self._starts: list[int] = []

    def map(self, num_bytes: int) -> mmap.mmap:
        """Return a new file's memory, all zeros. The file is gone when nobody has this any more.

        Raises:
            OSError: The disk has no room for it, or cannot be written to.
            InvariantViolation: This system cannot do it; see `file_room_bytes`.
        """
        if not has(LinuxCall.FILE_MEMORY):
            raise InvariantViolation("this system has no room for memory in files")
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapping = mmap.mmap(file.fileno(), num_bytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self._lock:
            self._mapped = {at: known for at, known in self._mapped.items() if known() is not None}
            self._mapped[start] = weakref.ref(mapping)
            self._starts = sorted(self._mapped)
        return mapping

    def leave(self, address: int, num_bytes: int) -> None:
        """Nobody looks at these bytes for a while, wherever they lie: those of a file need not be in memory."""
        with self._lock:
            number = bisect_right(self._starts, address)
            start = self._starts[number - 1] if number else 0
            mapping = self._mapped[start]() if number else None
        if mapping is not None and address < start + len(mapping):
            first = (address - start) // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_DONTNEED, first, min(address + num_bytes - start, len(mapping)) - first)


def _is_in_memory(folder: Path, mounts: Path) -> bool:
    """Whether what is written there lies in memory (proc_pid_mountinfo(5)); where nobody knows, it does."""
    try:
        device = folder.stat().st_dev
        lines = mounts.read_text().splitlines()
    except OSError:
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return any(kind in _IN_MEMORY for kind in kinds)
