"""Where the checkpoints of a run lie: a folder of this machine, or a prefix of an object store.

    local     <location>/round_000012/   written aside, then renamed: see `whole_folder`
    s3://...  the same names; no rename there: the manifest, written last, makes it one

What a place is asked for is little, so that both mean the same by it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from shoal.checkpoint.whole_folder import WholeFolder, remove_folder, remove_leftovers
from shoal.errors import ConfigError, PlaceTaken
from shoal.runtime.durable_files import FileDigest, make_directory, put_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shoal.checkpoint.tensor_file import OutFile

_FOLDER: Final = re.compile(r"round_(\d{6,})")
_WRITER: Final = ".writer"
"""Says who writes to the folder; what a writer that was killed has left there is its successor's to replace."""
_MAX_WRITER_BYTES: Final = 200


class Draft(Protocol):
    """One folder that is being written; `whole_folder.WholeFolder` is one. Methods raise OSError if the disk fails."""

    def create(self, name: str) -> OutFile:
        """Begin a file."""
        ...

    def write(self, name: str, content: Buffer) -> FileDigest:
        """Write a file."""
        ...

    def put_into_place(self) -> None:
        """From now on it is there."""
        ...

    def discard(self) -> None:
        """Leave nothing of what is not in place."""
        ...


class CheckpointPlace(Protocol):
    """Folders with files. Methods raise OSError for a disk that fails, StorageError for a store that does.

    Attributes:
        location: The folder or URL, for messages.
    """

    location: str

    def folders(self) -> list[str]:
        """The names of all folders; none if there is no such place."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder, with their sizes in bytes."""
        ...

    def modified_unix_s(self, folder: str) -> float:
        """When a folder was put there, as the place says; who has copied it may have changed that."""
        ...

    def read(self, folder: str, name: str, size_bytes: int) -> bytes:
        """A file's bytes; at most one more than `size_bytes`, which says that it is longer. FileNotFoundError: none."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Write as the only one. PlaceTaken: somebody else does; an object store cannot say."""
        ...

    def draft(self, folder: str) -> Draft:
        """Begin a folder."""
        ...

    def remove(self, folder: str, begun: Callable[[], None] = lambda: None) -> None:
        """Remove a folder; one that is being removed is none already: `begun` is called then."""
        ...

    def remove_leftovers(self) -> None:
        """Remove what writers that were killed have left and no name leads to."""
        ...

    def free_bytes(self) -> int | None:
        """What may still be written; None: nobody says."""
        ...


class LocalPlace:
    """A folder of this machine. A `CheckpointPlace`."""

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        self._path = path

    def folders(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._path.iterdir() if entry.is_dir() and entry.name[0] != ".")
        except FileNotFoundError:
            return []

    def sizes(self, folder: str) -> dict[str, int]:
        with os.scandir(self._path / folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    def modified_unix_s(self, folder: str) -> float:
        return (self._path / folder).stat().st_mtime

    def read(self, folder: str, name: str, size_bytes: int) -> bytes:
        with (self._path / folder / name).open("rb") as file:
            return file.read(size_bytes + 1)

    @contextmanager
    def alone(self) -> Generator[None]:
        make_directory(self._path)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                # Not waited for: a mirror that stands still would let this one stand still.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise PlaceTaken(self.location, self._writer()) from error
            except OSError:  # a disk that knows no locks, as of some file servers: then nobody is refused
                pass
            writer = self._path / _WRITER
            # A checkpoint does not fail because it cannot be said who writes it.
            with suppress(OSError):
                said = f"process {os.getpid()} on {platform.node()}"
                put_whole(writer, said.encode(errors="backslashreplace"), lasting=False)
            try:
                yield
            finally:
                with suppress(OSError):
                    writer.unlink()
        finally:
            os.close(descriptor)

    def _writer(self) -> str:
        """Who has the folder's lock; empty: it does not say so, as an earlier version, or one that begins or ends."""
        try:
            with (self._path / _WRITER).open("rb") as file:
                said = file.read(_MAX_WRITER_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "".join(character for character in said if character.isprintable())

    def draft(self, folder: str) -> WholeFolder:
        return WholeFolder(self._path / folder)

    def remove(self, folder: str, begun: Callable[[], None] = lambda: None) -> None:
        remove_folder(self._path / folder, begun)

    def remove_leftovers(self) -> None:
        remove_leftovers(self._path, "round_*")

    def free_bytes(self) -> int | None:
        there = next(path for path in (self._path, *self._path.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free


def place_of(location: str) -> CheckpointPlace:
    """The place that a person has named: a folder, or `s3://bucket/prefix`.

    Raises:
        ConfigError: There is no such kind of place here.
        StorageError: The store cannot be used.
    """
    if "://" not in location:
        return LocalPlace(Path(location))
    from shoal.checkpoint.object_store import ObjectPlace

    return ObjectPlace(location)


def folder_of(round: int) -> str:
    """The name of a checkpoint's folder."""
    return f"round_{round:06d}"


def round_of(folder: str) -> int | None:
    """The round whose checkpoint a folder is; None: the name is of something else."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found is not None and folder == folder_of(int(found[1])) else None


def inside(location: str, name: str) -> str:
    """The location of a folder in a place.

    Raises:
        ConfigError: The name is none of a folder.
    """
    if not name or name[0] == "." or "/" in name or "\\" in name:
        raise ConfigError(f"{name!r} is no name of a run, so there are no checkpoints of it")
    if location.endswith("://"):
        raise ConfigError(f"{location} is no place of checkpoints: a bucket is missing, as in s3://bucket/prefix")
    return f"{location.rstrip('/')}/{name}"
