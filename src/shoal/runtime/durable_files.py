"""What makes a file that was written last: that it is whole, that the disk has it, and that its folder knows it there.

file: write parts -> fsync -> size -> forget what is cached -> read back and compare
folder: fsync -> rename, or two names exchanged in one step -> fsync of the parent
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from shoal.runtime.linux_calls import LinuxCall, has

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BLOCK_BYTES: Final = 1 << 20
_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
"""Of Linux (renameat2(2))."""
_UNKNOWN_OF_DIRECTORIES: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP})
"""What fsync(2) says where it is for files alone."""


class FileDigest(NamedTuple):
    """What a file is, as a whole: its size and the SHA-256 (hex) of its bytes."""

    size_bytes: int
    sha256: str


class DurableFile:
    """A file that is written once, its parts in any order, and then read back from the disk.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._position = 0
        self._parts: dict[int, FileDigest] = {}

    def write(self, content: Buffer, offset: int | None = None) -> None:
        """Write a part of the file.

        Args:
            offset: where it begins; None: where the part before has ended.

        Raises:
            OSError: it cannot be written in full.
        """
        view = memoryview(content)
        if offset is not None and offset != self._position:
            self._file.seek(offset)
            self._position = offset
        if not view.nbytes:
            return
        if self._file.write(view) != view.nbytes:
            raise OSError(f"{self._path.name} could not be written in full; is the disk full?")
        self._parts[self._position] = FileDigest(view.nbytes, hashlib.sha256(view).hexdigest())
        self._position += view.nbytes

    def finish(self) -> FileDigest:
        """Force the file to the disk, and read it back from there.

        Raises:
            OSError: that failed, or something else than was written is read back.
        """
        self._file.flush()
        _force_to_disk(self._file.fileno())
        self._file.close()
        require_size(self._path, sum(part.size_bytes for part in self._parts.values()))
        return self._read_back()

    def _read_back(self) -> FileDigest:
        whole, size_bytes = hashlib.sha256(), 0
        with self._path.open("rb", buffering=0) as file:
            _forget_cached(file.fileno())
            for start, part in sorted(self._parts.items()):
                found, left = hashlib.sha256(), part.size_bytes
                while left and (block := file.read(min(left, _BLOCK_BYTES))):
                    found.update(block)
                    whole.update(block)
                    left -= len(block)
                if start != size_bytes or found.hexdigest() != part.sha256:
                    raise OSError(
                        f"{self._path.name} is read back as something else than was written; is the disk sound?"
                    )
                size_bytes += part.size_bytes
        return FileDigest(size_bytes, whole.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


def put_whole(path: Path, content: bytes, *, lasting: bool, private: bool = False) -> None:
    """Put a file in place, or leave what was there: who reads it finds the whole of the old or of the new content.

    Args:
        lasting: it is on the disk when this returns, and outlives a loss of power.
        private: its owner alone may read it, whatever the umask.

    Raises:
        OSError: it could not be written in full; nothing is left of the attempt.
    """
    unfinished = path.with_name(f".{path.name}.{threading.get_native_id()}.unfinished")
    # In a folder that others have made this name may be a link, to any file of this user.
    unfinished.unlink(missing_ok=True)
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                _force_to_disk(file.fileno())
        require_size(unfinished, len(content))
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    if lasting:
        sync_directory(path.parent)


def require_size(path: Path, size_bytes: int) -> None:
    """Check that a file has all that was written to it: a full disk may have taken less without a word.

    Raises:
        OSError: it has not.
    """
    found = path.stat().st_size
    if found != size_bytes:
        raise OSError(f"{path.name} has {found} of {size_bytes} bytes; is the disk full?")


def sync_directory(directory: Path) -> None:
    """Force to the disk which files a directory has; some file servers know no such request.

    Raises:
        OSError: that failed.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _force_to_disk(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN_OF_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it, down to the disk; one that is there stays as it is.

    Raises:
        OSError: it cannot be made.
    """
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, in one step; False: the system or the disk cannot, and nothing has changed."""
    if not has(LinuxCall.EXCHANGE):
        return False
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _force_to_disk(descriptor: int) -> None:
    """Have the disk keep what was written; macOS's fsync leaves it in the disk's own cache (fsync(2) there)."""
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        # A disk that is reached over the network may know only the other one.
        with suppress(OSError):
            fcntl.fcntl(descriptor, full_sync)
            return
    os.fsync(descriptor)


def _forget_cached(descriptor: int) -> None:
    """Have what is read come from the disk, where the system can: memory that is sound says nothing about it."""
    if has(LinuxCall.CACHE_ADVICE):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
