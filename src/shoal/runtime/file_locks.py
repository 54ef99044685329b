"""Locks that one process of this host holds at a time; its end gives them up, however it ends.

Some disks know no locks, as that of a file server without a service for them, or Lustre as it is mounted usually. A
file of this machine is locked then, whose name stands for the other one's.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What flock(2) says where there are none."""
_STAND_INS: Final = Path("/tmp")


def lock(path: Path, *, waits: bool = True) -> int:
    """Lock a file, which is made if it is not there; returns the descriptor that holds the lock until it is closed.

    Args:
        waits: for the process that has the lock.

    Raises:
        BlockingIOError: another process has the lock, and it is not to be waited for.
        OSError: the file cannot be made, or neither it nor one of this machine be locked.
    """
    try:
        return _locked_file(path, waits=waits)
    except OSError as error:
        if error.errno not in _NO_LOCKS or (stand_in := _stand_in(path)) is None:
            raise
    return _locked_file(stand_in, waits=waits)


def _locked_file(path: Path, *, waits: bool) -> int:
    with ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        stack.pop_all()
    return descriptor


def _stand_in(path: Path) -> Path | None:
    """Return the file that is locked for one on a disk without locks; None: somebody else may have made its folder."""
    # Where runs have their directories, which are no files (`run_dir`).
    folder = _STAND_INS / f"shoal-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return None
    return folder / f"{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:32]}.lock"


@contextmanager
def locked(path: Path, *, waits: bool = True) -> Generator[None]:
    """Hold the lock of a file for a while; see `lock`."""
    descriptor = lock(path, waits=waits)
    try:
        yield
    finally:
        os.close(descriptor)
