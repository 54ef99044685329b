"""What one run has of its machine for itself: a directory with a short private path for Unix sockets, and ports.

`$XDG_RUNTIME_DIR/shoal-<uid>/<8 hex>` or, where that variable is not usable or names what is gone with the login,
`/tmp/shoal-<uid>/<8 hex>`. A run holds a lock on its directory for as long as it lives, so one that nobody locks is a
dead run's and is removed by the next one. Creating and removing are serialised by a lock on the parent. Ports are
claimed by sockets that the run holds as long, folders by locks. All of it is gone when the run is. A launcher leaves a
note there of what it runs (`RunNote`), so that other commands of its user find it. Whoever clears the directory away
while the run lives does not end it: its processes make it again, and it is locked as soon as it is there.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from shoal.errors import MALFORMED, ConfigError
from shoal.file_thread import said_and_remedy
from shoal.ids import PeerId
from shoal.runtime.durable_files import put_whole
from shoal.runtime.file_locks import locked

_LOCK_NAME = "lock"
_TMP = Path("/tmp")
_OF_LOGINS = Path("/run/user")
"""Here a login manager gives each user a directory, and removes it when the user has logged out."""
# sockaddr_un(7): 108 bytes with the closing zero; macOS has 104.
_MAX_SOCKET_PATH_BYTES = 103
NOTE_NAME: Final = "run.json"


class RunDir:
    """A locked, private directory, and the claimed ports; as a context, it gives both back at the end.

    Attributes:
        path: mode 0700.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Make the directory, after removing those of dead runs.

        Args:
            parent: by default $XDG_RUNTIME_DIR if it is ours and stays, else /tmp.

        Raises:
            ConfigError: the parent cannot be written or belongs to another user.
        """
        root = (parent or _default_parent()) / f"shoal-{os.getuid()}"
        _make_private(root)
        with locked(root / _LOCK_NAME):
            _remove_dead(root)
            self._claims: list[socket.socket] = []
            self._folders: list[int] = []
            self._note: RunNote | None = None
            self.path = root / _new_name()
            self.path.mkdir(mode=0o700)
            self._lock_fd = _made_and_locked(self.path)

    def socket_path(self, name: str) -> Path:
        """Return the path of a Unix socket in this directory.

        Raises:
            ConfigError: the path is longer than the system takes for a socket.
        """
        return socket_path(self.path, name)

    def claim_port(self, port: int) -> bool:
        """Claim a TCP port until the end of the run; without a claim, a run that starts now would find it free as well.

        The claim is the UDP port of that number, which no run uses: the system lets one process of any user have it.

        Returns:
            False if another process has it.
        """
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            claim.bind(("0.0.0.0", port))
        except OSError:
            claim.close()
            return False
        self._claims.append(claim)
        return True

    def claim_folder(self, folder: Path) -> bool:
        """Claim a folder until the end of the run: what two launchers write into one is of neither.

        Returns:
            False if another process has it. On a disk that knows no locks nobody is refused.

        Raises:
            OSError: there is no such folder.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:  # as of some file servers
            pass
        self._folders.append(descriptor)
        return True

    def announce(self, note: RunNote) -> None:
        """Say what runs here, to other commands of this user on this host.

        Raises:
            ConfigError: it cannot be written.
        """
        write_note(self.path, note)
        self._note = note

    def restore(self) -> None:
        """Make the directory again, and the note in it, where somebody has cleared them away.

        Raises:
            BlockingIOError: another process is making or removing directories at this moment.
            ConfigError: it cannot be made.
            OSError: it cannot be looked at.
        """
        if not self._is_there:
            before, self._lock_fd = self._lock_fd, keep_directory(self.path, waits=False)
            os.close(before)
        if self._note is not None and not (self.path / NOTE_NAME).exists():
            write_note(self.path, self._note)

    @property
    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._lock_fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Remove the directory, and give up what was claimed; the second call does nothing."""
        while self._claims:
            self._claims.pop().close()
        while self._folders:
            os.close(self._folders.pop())
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def keep_directory(path: Path, *, waits: bool = True) -> int:
    """Make the directory of a run again that was cleared away, if nobody has yet, and return the descriptor that keeps
    it the directory of a living run until it is closed.

    Args:
        waits: for processes that are making or removing directories.

    Raises:
        BlockingIOError: there is one, and it is not waited for.
        ConfigError: it cannot be made, or its parent belongs to another user.
    """
    _make_private(path.parent)
    try:
        with locked(path.parent / _LOCK_NAME, waits=waits):
            return _made_and_locked(path)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot make the runtime directory {path}: {error.strerror}") from error


def _made_and_locked(path: Path) -> int:
    """Return the descriptor that holds the lock; the caller holds that of the parent, so nobody sees it without."""
    path.mkdir(mode=0o700, exist_ok=True)
    # Not a file in it: of what nobody touches for days /tmp is cleared, unless the directory is locked.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Shared by the launcher and those of its roles that had to make it again.
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def socket_path(directory: Path, name: str) -> Path:
    """Return `directory / name` if it fits into the address of a Unix socket.

    Raises:
        ConfigError: it does not.
    """
    path = directory / name
    size_bytes = len(os.fsencode(path))
    if size_bytes > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {size_bytes} bytes, the system takes {_MAX_SOCKET_PATH_BYTES}: "
            f"set XDG_RUNTIME_DIR to a shorter directory of yours, or unset it to use /tmp"
        )
    return path


def require_socket_room(name: str) -> Path:
    """Return where the next run of this user makes its directory, if sockets of this name fit there.

    Raises:
        ConfigError: they do not, or the parent cannot be used.
    """
    root = _default_parent() / f"shoal-{os.getuid()}"
    _make_private(root)
    socket_path(root / _new_name(), name)
    return root


@dataclass(frozen=True)
class FoundDir:
    """The directory of a run of this user.

    Attributes:
        note: of its launcher; None: it has left none, as a command has none that only looks at a run.
    """

    path: Path
    note: RunNote | None
    is_alive: bool


def found_dirs(parent: Path | None = None) -> list[FoundDir]:
    """Return the directories of all runs of this user on this host, sorted by their paths.

    Args:
        parent: by default $XDG_RUNTIME_DIR and /tmp: another shell may have had that variable, or not.
    """
    parents = {*_parents()} if parent is None else {parent}
    found: list[FoundDir] = []
    for root in (each / f"shoal-{os.getuid()}" for each in sorted(parents)):
        if not _is_private(root):
            continue  # no run of this user's can have been in it, and anybody can make one in /tmp
        with locked(root / _LOCK_NAME):
            directories = sorted(path for path in root.iterdir() if path.is_dir())
            found += [FoundDir(path, read_note(path), _is_alive(path)) for path in directories]
    return found


def remove_dead_dir(path: Path) -> bool:
    """Remove the directory of a run unless it is alive; returns whether it is gone.

    Raises:
        ConfigError: its parent belongs to another user.
    """
    _make_private(path.parent)
    with locked(path.parent / _LOCK_NAME):
        if path.is_dir() and not _is_alive(path):
            shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _new_name() -> str:
    return secrets.token_hex(4)


def _default_parent() -> Path:
    return _parents()[0]


def _parents() -> list[Path]:
    """Return where the runs of this user are, first where the next one is."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su` and in some containers the variable names another user's directory, or none; a relative path is not
    # valid there (XDG Base Directory Specification), and would mean something else to p2pd.
    if (
        os.path.isabs(runtime_dir)
        and os.access(runtime_dir, os.W_OK | os.X_OK)
        and os.stat(runtime_dir).st_uid == os.getuid()
    ):
        own = Path(runtime_dir)
        # A run may outlive the login in which it was started, by nohup or tmux.
        goes = own.resolve() == _OF_LOGINS / str(os.getuid())
        return [_TMP, own] if goes and _takes_runs(_TMP) else [own, _TMP]
    return [_TMP]


def _takes_runs(parent: Path) -> bool:
    """Whether this user can have a directory there, or has one."""
    root = parent / f"shoal-{os.getuid()}"
    return _is_private(root) if os.path.lexists(root) else os.access(parent, os.W_OK | os.X_OK)


def _make_private(root: Path) -> None:
    try:
        root.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the runtime directory {root}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    # In a /tmp that everybody writes to, somebody else may have made it first, or linked it elsewhere.
    if not _is_private(root):
        raise ConfigError(
            f"the runtime directory {root} has to be a directory of yours with mode 0700: "
            f"remove it or set XDG_RUNTIME_DIR"
        )


def _is_private(root: Path) -> bool:
    """Whether it is there, belongs to this user, and nobody else may look into it."""
    try:
        found = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _remove_dead(root: Path) -> None:
    """Remove the directories that no living run has locked; the caller holds the lock of `root`."""
    for directory in root.iterdir():
        if directory.is_dir() and not _is_alive(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_alive(directory: Path) -> bool:
    """Whether a living run has locked its directory; the caller holds the lock of the parent, so none is being made."""
    try:
        lock_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # its own run, or who cleaned up, was removing it
    except OSError:
        return True  # nothing says that it is dead
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock_fd)


class RunNote(msgspec.Struct, frozen=True, kw_only=True):
    """A run on this host, as its launcher says it in the directory that it has locked (run.json): the directory's mode
    decides who may read it, and its lock says whether it still holds.

    Attributes:
        hosts: what of it runs here: its client, or servers or a mirror alone.
        launcher_pid: of the process that Ctrl-C reaches.
        client: who the client is; empty: it runs on another host.
        socket: the client's Unix socket.
    """

    run_id: str
    hosts: Literal["client", "servers", "mirror"]
    launcher_pid: int
    begun_unix_s: float
    log_dir: str
    client: PeerId = PeerId("")
    socket: str = ""


def write_note(directory: Path, note: RunNote) -> None:
    """Write it, whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    path = directory / NOTE_NAME
    try:
        put_whole(path, msgspec.json.encode(note), lasting=False)
    except OSError as error:
        raise ConfigError(f"cannot write {path} {said_and_remedy(error, path, 'set XDG_RUNTIME_DIR')}") from error


def read_note(directory: Path) -> RunNote | None:
    """Return the note in a directory; None if there is none, or it is of another version."""
    try:
        return msgspec.json.decode((directory / NOTE_NAME).read_bytes(), type=RunNote)
    except (OSError, *MALFORMED):
        return None
