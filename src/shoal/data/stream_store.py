"""What has arrived of a stream, on the disk: windows of so many samples, and the manifest that says what they are.

manifest.jsonl     facts of the stream, then a line for each window: where it was taken, and its SHA-256; only added to
held_out.samples   the samples that are held out
00000007.samples   window 7; given up once it is recorded, and made again from the stream where it is needed again

Each line has the SHA-256 of all before it in its own, so that one that was changed is found. A line is written when its
window is on the disk; of a line that was being written when its process died nothing is left.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec
from shoal.data.streams import StreamPlace
from shoal.errors import MALFORMED, StorageError
from shoal.file_thread import said_and_remedy
from shoal.runtime.durable_files import DurableFile, make_directory, put_whole, sync_directory
from shoal.runtime.file_locks import lock

FORMAT: Final = 1
"""Of the folder; goes up when what is in it, or how samples are made of a stream, is another one."""

_ELSEWHERE: Final = "choose another place by data.cache_dir, or a smaller data.shuffle_window"

_Line = TypeVar("_Line")


class StreamFacts(msgspec.Struct, frozen=True):
    """What holds for the whole stream.

    Attributes:
        window: Samples of each window.
        begin: Where those begin that are trained on.
    """

    format: int
    window: int
    inputs: ArraySpec
    labels: ArraySpec
    num_classes: int
    num_holdout: int
    holdout_sha256: str
    begin: StreamPlace

    @property
    def fields(self) -> Fields[ArraySpec]:
        """Of each sample."""
        return Fields(self.inputs, self.labels)


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where the stream goes on, which begins anew at its end.

    Attributes:
        repeat: So many times it has ended before.
    """

    repeat: int
    place: StreamPlace


class WindowEntry(msgspec.Struct, frozen=True):
    """One window.

    Attributes:
        past: Rows of the stream that were read before it began anew.
        read: Rows that have been read since, up to the window's end and perhaps some more.
        skipped: Of all these, those that could not be read.
        chain: SHA-256 of the line without it, and of the chain before; empty: not known yet.
    """

    number: int
    start: Cursor
    then: Cursor
    past: int
    read: int
    skipped: int
    sha256: str
    chain: str = ""


def record_of(fields: Fields[ArraySpec]) -> np.dtype[np.void]:
    """Return how a sample lies in a file."""
    return np.dtype([(name, getattr(fields, name).dtype, getattr(fields, name).shape) for name in ("inputs", "labels")])


class WindowStore:
    """The folder of a stream. One process writes it at a time, any number read.

    Attributes:
        beginning: SHA-256 (hex) of the facts, once `entries` were read.

    Raises:
        StorageError: Its manifest is not as it was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.holdout = folder / "held_out.samples"
        self._manifest = folder / "manifest.jsonl"
        # Of the whole lines that were read or written.
        self._chain, self._size_bytes = "", 0
        self.beginning = ""

    def path(self, number: int) -> Path:
        """Where a window is, while it is there."""
        return self.folder / f"{number:08d}.samples"

    def facts(self) -> StreamFacts | None:
        """Return what is known of the stream, if it is."""
        try:
            with self._manifest.open("rb") as file:
                line = file.readline()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._changed(str(error.strerror or error)) from error
        return self._decoded(line, StreamFacts)

    def whole_facts(self) -> StreamFacts | None:
        """Return what is known of the stream, if the samples that are held out are there as well."""
        facts = self.facts()
        return facts if facts is not None and self.is_whole(self.holdout, facts.holdout_sha256) else None

    @contextmanager
    def locked(self) -> Generator[None]:
        """Be the only process that writes here; waits for one that is about to end.

        Raises:
            StorageError: The folder cannot be written.
        """
        with self._written():
            make_directory(self.folder)
            descriptor = lock(self.folder / "writer.lock")
        try:
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> list[WindowEntry]:
        """Return what is known of its windows, from the first one on; none: nothing is known of the stream."""
        try:
            first, *lines = self._manifest.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise self._changed(str(error)) from error
        self.beginning = hashlib.sha256(first).hexdigest()
        self._chain, self._size_bytes = self.beginning, len(first) + 1
        found: list[WindowEntry] = []
        for line in lines:
            entry = self._decoded(line, WindowEntry)
            self._chain = _chained(self._chain, entry)
            if entry.chain != self._chain or entry.number != len(found):
                raise self._changed(f"line {len(found) + 2} does not follow from those before")
            found.append(entry)
            self._size_bytes += len(line) + 1
        return found

    def begin(self, facts: StreamFacts) -> None:
        """Begin the manifest.

        Raises:
            StorageError: It cannot be written.
        """
        with self._written():
            put_whole(self._manifest, msgspec.json.encode(facts) + b"\n", lasting=True)
        self.entries()

    def chained(self, entry: WindowEntry) -> WindowEntry:
        """Return a window as it is noted where it comes next, behind `entries`, which have been read."""
        return msgspec.structs.replace(entry, chain=_chained(self._chain, entry))

    def add(self, entry: WindowEntry) -> WindowEntry:
        """Add a window, whose file is on the disk, to `entries`, which have been read; return what is noted of it.

        Raises:
            StorageError: It cannot be written.
        """
        entry = self.chained(entry)
        line = msgspec.json.encode(entry) + b"\n"
        with self._written(), self._manifest.open("r+b") as file:
            # What a process that died has left of a line is no line.
            file.truncate(self._size_bytes)
            file.seek(0, os.SEEK_END)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._chain, self._size_bytes = entry.chain, self._size_bytes + len(line)
        return entry

    @contextmanager
    def writing(self, path: Path) -> Generator[DurableFile]:
        """Give the file to write samples to, which `put` puts in place before this ends.

        Raises:
            StorageError: It cannot be written.
        """
        with self._written():
            make_directory(self.folder)
            try:
                with DurableFile(_unfinished(path)) as file:
                    yield file
            finally:
                _unfinished(path).unlink(missing_ok=True)

    def put(self, path: Path) -> None:
        """Put a file of samples in place, which `DurableFile.finish` has forced to the disk.

        Raises:
            StorageError: It cannot be written.
        """
        with self._written():
            _unfinished(path).replace(path)
            sync_directory(self.folder)

    def is_whole(self, path: Path, sha256: str) -> bool:
        """Return whether a file of samples is there as it was written."""
        try:
            with path.open("rb", buffering=0) as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == sha256
        except OSError:
            return False

    def forget_below(self, number: int) -> None:
        """Give up the files of windows before one of them."""
        for path in self.folder.glob("*.samples"):
            if path.stem.isdecimal() and int(path.stem) < number:
                path.unlink(missing_ok=True)

    def _decoded(self, line: bytes, kind: type[_Line]) -> _Line:
        try:
            return msgspec.json.decode(line, type=kind)
        except MALFORMED as error:
            raise self._changed(str(error)) from error

    def _changed(self, why: str) -> StorageError:
        return StorageError(
            f"{self._manifest} says what a stream has given, and is not as it was written ({why}); remove "
            f"{self.folder} to begin anew"
        )

    @contextmanager
    def _written(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write {self.folder} {said_and_remedy(error, self.folder, _ELSEWHERE)}"
            ) from error


def packed(sample: Fields[Array], record: np.dtype[np.void]) -> bytes:
    """Return a sample as it lies in a file."""
    row = np.empty((), record)
    row["inputs"], row["labels"] = sample.inputs, sample.labels
    return row.tobytes()


def _chained(before: str, entry: WindowEntry) -> str:
    line = msgspec.json.encode(msgspec.structs.replace(entry, chain=""))
    return hashlib.sha256(before.encode() + line).hexdigest()


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".unfinished")
