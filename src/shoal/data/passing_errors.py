"""What the system does not give now, and may give later: it is asked again, a few times, before anything follows.

    reading raises --> an error of the file, or of its decoder --> whoever reads says what follows
                  '--> an error of the system, as EIO --> it is read again, a few times --> StorageError

So no sample is left out, and none stands in for another one, because of an error that passes: another time, as in
another process or in a replay, the system gives it, and the samples of a run would be others.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from typing import Final, TypeVar, cast

import anyio

from shoal.clock import Backoff, Clock, SystemClock
from shoal.errors import ShoalError, StorageError, UnreadableAudio

_OPEN_FILES: Final = "raise the limit of open files (`ulimit -n`)"
_MEMORY: Final = "free memory on this host"
_STORAGE: Final = (
    "see whether the disk or the network file system of the data answers (`dmesg`); if this sample alone cannot be "
    "read, leave it out of the data set"
)
_OF_THE_SYSTEM: Final[Mapping[int, str]] = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _OPEN_FILES),
    **dict.fromkeys((errno.ENOMEM, errno.ENOBUFS), _MEMORY),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN), _STORAGE
    ),
}
"""What to do about errors that say nothing of the file that is read; others, as ENOENT and EACCES, are its own."""

_ATTEMPTS: Final = 6
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 4.0

_Found = TypeVar("_Found")


def read_patiently(read: Callable[[], _Found], which: Callable[[], str], clock: Clock | None = None) -> _Found:
    """Return what reading gives, which is tried again as long as the system does not give it.

    Args:
        which: Names what is read, for people.
        clock: Says how long to wait in between.

    Raises:
        StorageError: The system does not give it.
        Exception: As `read`, if that says something of what is read.
    """
    backoff = Backoff(first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S)
    left = _ATTEMPTS if _may_wait() else 1
    while True:
        left -= 1
        try:
            return read()
        except Exception as error:
            reason = of_the_system(error)
            if reason is None:
                raise
            if not left:
                raise StorageError(
                    f"{which()} is not read, for a reason that is none of its own, and no other one is trained in its "
                    f"place: {reason}; {_OF_THE_SYSTEM[cast('int', reason.errno)]}"
                ) from error
        anyio.run(backoff.wait, clock or SystemClock())


def of_the_system(error: BaseException) -> OSError | None:
    """Return the error of the system, and not of a file, that has led to another one, or is it; None: there is none, or
    who met it has said what follows."""
    if isinstance(error, ShoalError) and not isinstance(error, UnreadableAudio):
        return None
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _OF_THE_SYSTEM:
            return found
        found = found.__cause__ or found.__context__
    return None


def _may_wait() -> bool:
    """Whether no event loop runs in this thread, which would stand still meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False
