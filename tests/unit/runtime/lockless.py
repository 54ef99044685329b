"""A disk that knows no locks, as that of some file servers."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shoal.runtime import file_locks


def without_locks(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have no file below `disk` be locked; return a folder of a disk of this machine, where others are for them."""
    near, flock = disk.parent / f"{disk.name} near", fcntl.flock
    near.mkdir()

    def refuses(descriptor: int, operation: int) -> None:
        where = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if where.is_relative_to(disk):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuses)
    monkeypatch.setattr(file_locks, "_STAND_INS", near)
    return near
