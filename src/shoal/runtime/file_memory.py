"""Memory that lies in files without a name: of what nobody looks at, nothing has to be in a host's memory.

A file is mapped and closed. So it takes no descriptor, it is gone with its mapping however the process ends, and nobody
can open it to cut it. Its room on the disk is taken at once: a disk that is full later stops nobody who writes, unless
its file system never writes to the same place twice (btrfs, ZFS): there the process ends that finds no room, and is
started again. A process that is forked from this one does not have the file, and so writes nothing into it.

Pages that were read or written count as the process's memory until they are left. The file then has them: where the
host has memory that is free, from there, and else on the disk. To a control group they are cache, which makes room.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

from shoal.errors import InvariantViolation
from shoal.file_thread import lies_far, lies_in_memory, said_by_disk
from shoal.runtime.linux_calls import LinuxCall, has

_SHARE: Final = 2
"""One in so many bytes of what is free: logs, checkpoints and others need room too."""
_FAILED: Final = ctypes.c_void_p(-1).value

_starts = set[int]()
"""Where the memory of each file begins."""


def file_room(folder: Path, num_sharers: int = 1, most_bytes: int | None = None) -> tuple[int, str]:
    """Return how many bytes each of so many processes may have in files there, and if none, why.

    Args:
        most_bytes: that the user lets each have; None: any number.
    """
    if most_bytes == 0:
        return 0, "servers.max_disk_bytes is 0"
    if not has(LinuxCall.FILE_MEMORY):
        return 0, "this system cannot map them"
    if lies_far(folder):
        return 0, f"{folder} is on a disk of another machine"
    if lies_in_memory(folder):
        return 0, f"{folder} lies in memory itself"
    try:
        free_bytes = shutil.disk_usage(folder).free // _SHARE // num_sharers
    except OSError as error:
        return 0, said_by_disk(error, folder)
    return (free_bytes if most_bytes is None else min(free_bytes, most_bytes)), ""


def mapped(folder: Path, num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return a new file's memory, all zeros. The file is gone when nobody has this, or a view of it, any more.

    Args:
        folder: on which disk it lies.

    Raises:
        OSError: the disk has no room for it, or cannot be written to.
        InvariantViolation: this system cannot do it; see `file_room`.
    """
    if not has(LinuxCall.FILE_MEMORY):
        raise InvariantViolation("this system has no room for memory in files")
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc().mmap(None, num_bytes, access, mmap.MAP_SHARED, file.fileno(), 0)
    if start == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _advise(start, num_bytes, mmap.MADV_DONTFORK)
    _starts.add(start)
    memory = (ctypes.c_ubyte * num_bytes).from_address(start)
    # Not at the interpreter's end: others may still look at it then.
    weakref.finalize(memory, _unmap, start, num_bytes).atexit = False
    return memory


def _unmap(start: int, num_bytes: int) -> None:
    _starts.discard(start)  # first: what is given back may become anybody's
    _libc().munmap(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))


def is_mapped(start: int) -> bool:
    """Return whether the memory of a file begins there."""
    return start in _starts


def leave(address: int, num_bytes: int) -> None:
    """Nobody looks at these bytes of mapped files for a while: they need not be in memory. No other memory may be
    named: it would lose what is in it."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(first, address + num_bytes - first, mmap.MADV_DONTNEED)


def give_back_freed() -> None:
    """Give the system what was freed in this process and is kept for what comes (`runtime.clean_interpreter`), where
    the C library can (malloc_trim(3))."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _advise(start: int, num_bytes: int, advice: int) -> None:
    _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), advice)
