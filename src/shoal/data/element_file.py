"""Elements of a file, tokens or whole samples, by place: read when they are asked for, so that none stay in memory.

They are read by `pread`: pages of a mapping would count as memory of the process, once random reads have touched all of
them. What the system keeps of the file belongs to nobody, and is given up where memory is short.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from shoal.data.source import Array
from shoal.errors import StorageError
from shoal.runtime.linux_calls import LinuxCall, has


class ElementFile:
    """A file that is open as long as somebody has it. Usable from several threads.

    Raises:
        StorageError: It cannot be opened.
    """

    def __init__(self, path: Path, dtype: DTypeLike) -> None:
        self._path = path
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot read {path} ({error.strerror or error}): start the run again") from error
        weakref.finalize(self, os.close, self._fd)
        self.num_elements = os.fstat(self._fd).st_size // self.dtype.itemsize

    def read(self, starts: list[int], count: int) -> Array:
        """Return the elements (n, count) that begin at each of n places.

        Raises:
            StorageError: The file is shorter than it was.
        """
        size_bytes, num_bytes = self.dtype.itemsize, count * self.dtype.itemsize
        content = b"".join([os.pread(self._fd, num_bytes, start * size_bytes) for start in starts])
        if len(content) != len(starts) * num_bytes:
            raise StorageError(f"{self._path} is shorter than when it was opened: start the run again")
        return np.frombuffer(content, self.dtype).reshape(len(starts), count)

    def read_cached(self, starts: list[int], count: int) -> Array | None:
        """As `read`, of what the system has in its memory; None: not all is there, or that cannot be asked."""
        if not has(LinuxCall.READ_CACHED):
            return None
        size_bytes, num_bytes = self.dtype.itemsize, count * self.dtype.itemsize
        content = memoryview(bytearray(len(starts) * num_bytes))
        try:
            for number, start in enumerate(starts):
                part = content[number * num_bytes : (number + 1) * num_bytes]
                if os.preadv(self._fd, (part,), start * size_bytes, os.RWF_NOWAIT) != num_bytes:
                    return None
        except OSError:
            return None  # it would have to wait, or the file system does not know; whoever may wait finds out
        return np.frombuffer(content, self.dtype).reshape(len(starts), count)

    def advise(self, start: int, count: int, *, is_needed: bool) -> None:
        """Have the system read elements before they are asked for, or (`is_needed` false) give up its copy of them."""
        if has(LinuxCall.CACHE_ADVICE):
            advice = os.POSIX_FADV_WILLNEED if is_needed else os.POSIX_FADV_DONTNEED
            size_bytes = self.dtype.itemsize
            os.posix_fadvise(self._fd, start * size_bytes, count * size_bytes, advice)
