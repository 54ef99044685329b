"""A folder that is written aside and put into place as a whole: at its place is never a half, or parts of two.

    .name.<pid>.unfinished: files, each on the disk and read back -> fsync -> name (what was there goes) -> fsync

Every folder that shoal leaves is written so: a model, an export, a checkpoint.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, StorageError, os_error_as
from shoal.file_thread import said_and_remedy
from shoal.runtime.durable_files import DurableFile, FileDigest, exchange, make_directory, sync_directory

if TYPE_CHECKING:
    from typing_extensions import Buffer


class WholeFolder:
    """One folder that is being written; `put_into_place` ends that, `discard` leaves nothing of it.

    Args:
        path: The folder's place; an existing folder there is replaced as a whole.

    Attributes:
        aside: Where it is written.

    Raises:
        OSError: The folder cannot be begun.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.aside = _beside(path, "unfinished")
        self._inner: set[Path] = set()
        make_directory(path.parent)
        remove_leftovers(path.parent, glob.escape(path.name))
        self.aside.mkdir()

    def create(self, name: str) -> DurableFile:
        """Begin a file of the folder.

        Raises:
            OSError: It cannot be made.
        """
        path = self.aside / name
        if path.parent != self.aside:
            path.parent.mkdir(exist_ok=True)
            self._inner.add(path.parent)
        return DurableFile(path)

    def write(self, name: str, content: Buffer) -> FileDigest:
        """Write a file of the folder, down to the disk.

        Raises:
            OSError: It cannot be written in full, or is read back as something else.
        """
        with self.create(name) as file:
            file.write(content)
            return file.finish()

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of JSON.

        Raises:
            OSError: As `write`.
        """
        self.write(name, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")

    def put_into_place(self) -> None:
        """Replace what is there in one step. Where the system has none for this, there is no folder for a moment.

        Of a writer that is killed in this moment both folders are left, and the next one puts the old one back.

        Raises:
            OSError: It cannot be done.
        """
        for directory in (*self._inner, self.aside):
            sync_directory(directory)
        old = self.aside
        if not self._path.exists():
            self.aside.rename(self._path)
        elif not exchange(self.aside, self._path):
            old = _beside(self._path, "before")
            self._path.rename(old)
            self.aside.rename(self._path)
        sync_directory(self._path.parent)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Leave nothing behind; nothing happens after `put_into_place`."""
        shutil.rmtree(self.aside, ignore_errors=True)


def remove_folder(path: Path, begun: Callable[[], None]) -> None:
    """Remove a folder so that it is there as a whole or not at all.

    Args:
        begun: Called when it has lost its name, and its files are still there.

    Raises:
        OSError: It cannot be removed.
    """
    old = _beside(path, "old")
    path.rename(old)
    sync_directory(path.parent)
    begun()
    shutil.rmtree(old)


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Remove what writers that were killed have left of the folders whose names fit a pattern of `glob`.

    What was to be replaced and has no successor gets its name back.
    """
    for before in parent.glob(f".{pattern}.*.before"):
        place = parent / before.name[1:].rsplit(".", 2)[0]
        if place.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            before.rename(place)
    for kind in ("unfinished", "old"):
        for left in parent.glob(f".{pattern}.*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)


def require_place(path: Path, *, force: bool, known_by: tuple[str, ...]) -> None:
    """Check that a folder may be written at a path that a person has given.

    Args:
        force: It may replace a folder that has one of the files `known_by`: one that was written as this one will be.

    Raises:
        ConfigError: Something else is there.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir() or path.is_symlink():
        raise ConfigError(f"--to {path}: there is something that is no folder; choose another place")
    if not any(path.iterdir()):
        return
    if not any((path / name).is_file() for name in known_by):
        raise ConfigError(f"--to {path}: the folder there holds no model, and is not replaced; choose another place")
    if not force:
        raise ConfigError(f"--to {path}: there is a model already; --force replaces it, or choose another place")


def writing_to(path: Path | str) -> AbstractContextManager[None]:
    """Give a context for what writes a folder: an OSError in it becomes a StorageError."""
    return os_error_as(lambda error: StorageError(f"cannot write {path} {said_and_remedy(error, path)}"))


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{kind}")
