"""What is done with one file, in a thread: a disk that does not answer, as that of a network may, keeps nobody.

A disk of this machine answers: what lies there is read and written at once, which takes a tenth of the time.

    do --> the thread reads or writes --> the caller goes on, at the latest after `PATIENCE_S`
                                      '-- not in time: this and what follows wait in memory, in their order

So a line that was given away is on its way to the disk when its writer is killed, unless the disk hangs.

It is for who cannot await, and for launchers, whose interpreter waits at its end for every thread but one of these. A
role that awaits a disk leaves the thread behind that anyio gives it (`abandon_on_cancel`): no role's end waits.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from shoal.clock import SystemClock

PATIENCE_S: Final = 0.25
"""So long is the disk waited for; after what took longer, no longer until it is as fast again."""
_LEAVING_S: Final = 1.0
"""So long is it waited for what is left, when the file is to be closed."""
_LINGERS_S: Final = 0.1
"""So long does the thread wait for more to do, which then needs no new one."""

WANTED_FILES: Final = 65536
"""That a process may have open. Connections, pools and logs need far fewer; a usual soft limit of 1024 is fewer than
the connections alone may be."""


def hint(error: BaseException) -> str:
    """Return what to do about an error that says that no more files may be opened; empty for every other one."""
    said = _more_files(error)
    return f": {said}" if said else ""


def _more_files(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process may have {limit} files and connections open; allow more with `ulimit -n {WANTED_FILES}`"


def said_by_disk(error: OSError, path: str | Path) -> str:
    """Return what a disk has said; of want of inodes, too, it says that there is no space.

    Args:
        path: what was to be written, where the error does not name it; it need not be there.
    """
    if _lacks_inodes(error, path):
        return "there is space, and no inode for another file"
    return error.strerror or str(error)


def remedy(error: OSError, path: str | Path, instead: str = "") -> str:
    """Return what to do about what cannot be written: each error has a remedy of its own.

    Args:
        path: as in `said_by_disk`.
        instead: where else to write, which helps wherever the disk is the cause.
    """
    if said := _more_files(error):
        return said
    own = "remove some files there" if _lacks_inodes(error, path) else remedy_of(number_of(error))
    return f"{own}, or {instead}" if instead else own


def said_and_remedy(error: OSError, path: str | Path, instead: str = "") -> str:
    """Return the end of a message that something cannot be written: "(No space left on device): free space there".

    Args:
        path, instead: as in `remedy`.
    """
    return f"({said_by_disk(error, path)}): {remedy(error, path, instead)}"


UNNAMED: Final = 1
"""The number of an error that has none."""


def number_of(error: BaseException) -> int:
    """Return the number of what a system has said, or of the error that this one follows from; see `remedy_of`."""
    for each in (error, error.__cause__):
        if isinstance(each, OSError) and each.errno:
            return errno.EACCES if each.errno == errno.EPERM else each.errno
    return UNNAMED


def remedy_of(number: int) -> str:
    """Return what to do about a disk that gives this error, on this host or another one."""
    return _REMEDIES.get(number, "see whether there is space, and whether the disk is sound")


_AWAY: Final = "see why it does not answer"
_REMEDIES: Final = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "remove files of this user there, or have the user's quota raised",
    errno.EROFS: "mount it for writing: a system lets a disk that fails be read only, and `dmesg` says so",
    errno.EIO: "see in `dmesg` what fails, the disk or what it is connected by",
    errno.EACCES: "let this user write there",
    errno.EFBIG: "allow larger files, by `ulimit -f unlimited` or another file system",
    errno.ENOENT: "see who has removed the folder",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "move the file away that stands where a folder has to be"),
    errno.EMFILE: f"allow more open files there with `ulimit -n {WANTED_FILES}`",
    errno.ENFILE: "end other programs there, which have too many files open, or allow more with `sysctl fs.file-max`",
    **dict.fromkeys((errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN), _AWAY),
}


def nearest(path: Path) -> Path:
    """Return this absolute path, or the first of the folders above it that there is: in it the others would be made."""
    return next(each for each in (path, *path.parents) if each.exists())


def _lacks_inodes(error: OSError, path: str | Path) -> bool:
    """Whether a disk that says that it is full has space, but not for another file."""
    if error.errno == errno.ENOSPC:
        place = Path(error.filename or path).absolute()
        with suppress(OSError, ValueError):
            disk = os.statvfs(nearest(place))
            return bool(disk.f_files and not disk.f_favail and disk.f_bavail)
    return False


_OF_NETWORKS: Final = frozenset(
    (
        *("9p", "afpfs", "afs", "autofs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs"),
        *("nfs", "nfs4", "prl_fs", "smb3", "smbfs", "vboxsf", "webdav"),
    )
)
"""Kinds of file systems whose files lie on another machine; so do most of those that a program brings (`fuse.`).

What `autofs` stands for is mounted when it is first asked for.
"""
_OF_CONTAINERS: Final = "fuse.fuse-overlayfs"
_MOUNTS: Final = Path("/proc/self/mounts")
_OCTAL: Final = re.compile(r"\\([0-7]{3})")

_Result = TypeVar("_Result")


def always_answers(path: Path) -> bool:
    """Return whether a file is, or will be, one on a disk of this machine: no pipe, no terminal, no other's disk."""
    if lies_far(path):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True  # it is not there yet


def lies_far(path: Path) -> bool:
    """Return whether a place is on a disk of another machine, or of a program."""
    # A disk of a network that hangs already is not asked where a link leads.
    return _is_far(path.absolute()) or _is_far(Path(os.path.realpath(path)))


def lies_in_memory(path: Path) -> bool:
    """Return whether what is written to a place takes memory, as in many a temporary folder."""
    return _kind(Path(os.path.realpath(path))) in ("tmpfs", "ramfs")


def _is_far(place: Path) -> bool:
    kind = _kind(place)
    return kind in _OF_NETWORKS or (kind.startswith("fuse.") and kind != _OF_CONTAINERS)


def _kind(place: Path) -> str:
    kinds = _kinds(_MOUNTS)
    return next((kinds[each] for each in (place, *place.parents) if each in kinds), "")


@lru_cache(maxsize=1)
def _kinds(mounts: Path) -> dict[Path, str]:
    """The kind of file system by where it is mounted, as this process first finds it; of no disk is anything asked."""
    try:
        # Names are bytes, and need be text in no encoding.
        lines = [line.split(" ") for line in os.fsdecode(mounts.read_bytes()).split("\n") if line]
    except OSError:  # no Linux
        import psutil

        return {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    return {Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), where)): kind for _, where, kind, *_ in lines}


class FileThread:
    """What is done with one file, or with one disk.

    Attributes:
        num_waiting: how much of it is not done.
    """

    def __init__(self, name: str, late: Callable[[], None] = lambda: None, *, path: Path | None = None) -> None:
        """Do nothing yet.

        Args:
            late: called once each time that the disk begins to be waited for; not by the thread.
            path: of the file; the thread is not needed if it `always_answers`. None: it may not.
        """
        self._is_near = path is not None and always_answers(path)
        self._name = name
        self._late = late
        self._clock = SystemClock()
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._ends = self._is_slow = False

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    @property
    def hangs(self) -> bool:
        """Whether something waits for a disk that does not answer."""
        return self._is_slow and bool(self._jobs)

    def do(self, what: Callable[[], _Result]) -> Future[_Result]:
        """Call `what` after those that were given before: here if the file always answers, else in the thread.

        Returns:
            What it returns or raises; it is done, unless the disk does not answer. One that is cancelled before its
            turn is left out.
        """
        done: Future[_Result] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            begun_s = self._clock.now_s()
            try:
                done.set_result(what())
            except Exception as error:  # noqa: BLE001 - it is raised where the result is taken
                done.set_exception(error)
            if self._clock.now_s() - begun_s < PATIENCE_S:
                self._is_slow = False

        if self._is_near:
            job()
            return done
        with self._changed:
            self._ends = False
            self._jobs.append(job)
            self._begin()
            self._changed.notify()
        if not self._is_slow and not wait_for((done,), PATIENCE_S).done:
            self._is_slow = True
            self._late()
        return done

    def end(self) -> None:
        """Wait a while for what is left, and have the thread end; what is given later starts it again."""
        with self._changed:
            self._ends = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_LEAVING_S)

    def _begin(self) -> None:
        """Start the thread, unless it is there; a process that was forked has none of its parent's."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread left: then it is as without one
            self._thread = None
            while self._jobs:
                self._jobs[0]()
                self._jobs.popleft()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs and not self._ends:
                    self._changed.wait(_LINGERS_S)
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            job()
            with self._changed:
                self._jobs.popleft()
