"""Shared memory for batches: one segment of places of equal size, written by the data server, read by the trainers.

A large batch lies in several places, one after the other, and is named by the first of them.

The segment is an anonymous file (memfd) that lives as long as a process has it open or mapped: nothing in /dev/shm or
elsewhere has a name that a killed process could leave behind. Trainers of the same user open it as
`/proc/<pid>/fd/<n>`. Its size is sealed, so a mapping can never fault. Pages cost memory once they have been written;
free places are taken from the front, so places that were never needed cost nothing.

Where there is no memfd (macOS), a file in a directory of the caller takes its place; it is removed on close, and a
killed process leaves it to who removes that directory. Such a file may be cut by every process of its user, and whoever
then reads a mapping of it is killed: readers copy from the file instead, and a short read is an error like others.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvariantViolation, RemoteProtocolError
from shoal.runtime.sealed_memory import has_memfd, sealed_memfd

Bytes = NDArray[np.uint8]


class Pool:
    """The writer's end. Not thread-safe, except that different places may be written from different threads.

    Attributes:
        fd: of the segment, for a process that shall write into it as well: see `PoolWriter`.
    """

    def __init__(self, *, place_bytes: int, num_places: int, directory: Path | None = None) -> None:
        """Create the segment.

        Args:
            directory: where a named file is made if there is no memfd; None: where temporary files are.
        """
        self.place_bytes = place_bytes
        self.num_places = num_places
        self.num_bytes = place_bytes * num_places
        self._file: Path | None = None
        if has_memfd():
            self.fd = sealed_memfd("shoal-batches", self.num_bytes)
            self.path = f"/proc/{os.getpid()}/fd/{self.fd}"
        else:
            # Nobody but its owner may read or write it.
            self.fd, self.path = tempfile.mkstemp(prefix="shoal-batches-", dir=directory)
            self._file = Path(self.path)
            os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        # One bit for each place, the lowest for the first.
        self._free = (1 << num_places) - 1
        self._taken: dict[int, int] = {}

    def take(self, num_places: int = 1) -> int | None:
        """Return the first of so many free places in a row, which now belong to the caller; None: there are none."""
        starts = self._free
        for offset in range(1, num_places):
            starts &= self._free >> offset
        if not starts:
            return None
        place = (starts & -starts).bit_length() - 1
        self._taken[place] = num_places
        self._free ^= ((1 << num_places) - 1) << place
        return place

    def release(self, place: int) -> None:
        """Give back what was taken as `place`.

        Raises:
            InvariantViolation: it was not taken, or has been given back.
        """
        num_places = self._taken.pop(place, 0)
        if not num_places:
            raise InvariantViolation(f"place {place} of the batch pool was released twice")
        self._free ^= ((1 << num_places) - 1) << place

    def offset_bytes(self, place: int) -> int:
        """Return where a place begins, from the start of the segment."""
        return place * self.place_bytes

    def memory(self, place: int, num_places: int = 1) -> Bytes:
        """Return the bytes of places in a row, writable."""
        num_bytes = num_places * self.place_bytes
        return np.frombuffer(self._map, dtype=np.uint8, count=num_bytes, offset=self.offset_bytes(place))

    def close(self) -> None:
        """Let go of the segment; it vanishes when the last trainer has let go of it as well."""
        # A view that is still alive keeps the mapping until it is collected; that is all a failure to close means.
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class PoolWriter:
    """The places of a pool in another process of the data server, which says who writes where."""

    def __init__(self, fd: int, place_bytes: int) -> None:
        """Map the segment of an inherited descriptor, and close the descriptor."""
        self._place_bytes = place_bytes
        try:
            self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def memory(self, place: int, num_places: int = 1) -> Bytes:
        """Return the bytes of places in a row, writable."""
        return np.frombuffer(self._map, np.uint8, num_places * self._place_bytes, place * self._place_bytes)


class PoolReader:
    """Another process's segment, to read from."""

    def __init__(self, path: str, num_bytes: int) -> None:
        """Open it.

        Raises:
            RemoteProtocolError: there is no such segment, or it is smaller than said.
        """
        self.num_bytes = num_bytes
        self._map = map_pool(path, num_bytes) if has_memfd() else None
        self._fd = -1
        if self._map is None:
            self._fd = _open_pool(path, num_bytes)
            weakref.finalize(self, os.close, self._fd)

    def read(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Return bytes of the segment, which are inside it: its memory itself, or a copy where its size is not sealed.

        Raises:
            RemoteProtocolError: the segment has been cut.
        """
        if self._map is not None:
            return memoryview(self._map)[offset_bytes : offset_bytes + num_bytes]
        content = bytearray(num_bytes)
        left = memoryview(content)
        while left:
            if not (count := os.preadv(self._fd, [left], offset_bytes + num_bytes - len(left))):
                raise RemoteProtocolError(f"the batch pool ends before byte {offset_bytes + num_bytes}: it was cut")
            left = left[count:]
        return memoryview(content).toreadonly()


def map_pool(path: str, num_bytes: int) -> mmap.mmap:
    """Map another process's segment for reading; it stays mapped until it is collected with the last view of it.

    Raises:
        RemoteProtocolError: there is no such segment, or it is smaller than said.
    """
    fd = _open_pool(path, num_bytes)
    try:
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _open_pool(path: str, num_bytes: int) -> int:
    """Return the descriptor of another process's segment, for the caller to close; raises as `map_pool`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RemoteProtocolError(f"the batch pool {path} cannot be opened: {error}") from error
    size_bytes = os.fstat(fd).st_size
    if num_bytes < 1 or size_bytes < num_bytes:
        os.close(fd)
        raise RemoteProtocolError(f"the batch pool {path} has {size_bytes} bytes, not {num_bytes}")
    return fd
