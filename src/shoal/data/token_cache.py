"""Tokens of text on the disk of a host, made once and found again: a file of tokens, and a small one that says which.

found? -> sizes and time as noted -> open
       -> sizes right, time another -> its SHA-256 -> note the new time, or build anew
build: lock, a second builder waits -> .unfinished, on the disk, read back -> .tokens -> .json, by which it is found
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from shoal.config.training import DataConfig
from shoal.errors import MALFORMED, StorageError
from shoal.file_thread import said_and_remedy
from shoal.runtime.durable_files import DurableFile, make_directory, put_whole, sync_directory
from shoal.runtime.file_locks import lock
from shoal.runtime.user_cache import user_cache

FORMAT: Final = 1
"""Of the files, and of how documents become tokens; goes up when the same documents give others."""


class CachedTokens(msgspec.Struct, frozen=True):
    """What is known of a file of tokens.

    Attributes:
        vocabulary: Tokens are 0..vocabulary-1.
        text_bytes: What they were made of.
        skipped: Of the documents, those that could not be read.
        first_skipped: Where some of them are, and why, for people.
        sha256: Of the file, hexadecimal.
    """

    dtype: str
    vocabulary: int
    num_tokens: int
    text_bytes: int
    documents: int
    skipped: int
    first_skipped: tuple[str, ...]
    size_bytes: int
    sha256: str
    modified_ns: int


class TokenCache:
    """The tokens of one corpus by one tokenizer, of which there may be none yet.

    Args:
        key: Another text for other tokens.
    """

    def __init__(self, data: DataConfig, key: str) -> None:
        self._folder = user_cache("tokens") if data.cache_dir is None else data.cache_dir.expanduser()
        name = hashlib.sha256(f"{FORMAT}\n{key}".encode()).hexdigest()[:32]
        self.path = self._folder / f"{name}.tokens"
        self._noted = self._folder / f"{name}.json"

    def find(self, damaged: Callable[[str], None] = lambda reason: None) -> CachedTokens | None:
        """Return what there is, if it is whole.

        Args:
            damaged: Told why what is there cannot be used.
        """
        try:
            noted = msgspec.json.decode(self._noted.read_bytes(), type=CachedTokens)
        except FileNotFoundError:
            return None
        except (OSError, *MALFORMED) as error:
            damaged(f"{self._noted} cannot be read ({error})")
            return None
        try:
            stat = self.path.stat()
            if stat.st_size != noted.size_bytes:
                damaged(f"{self.path} has {stat.st_size} of {noted.size_bytes} bytes")
                return None
            if stat.st_mtime_ns == noted.modified_ns:
                return noted
            # Copied, perhaps, or written to by somebody else.
            if _sha256(self.path) != noted.sha256:
                damaged(f"{self.path} has other bytes than were written")
                return None
            noted = msgspec.structs.replace(noted, modified_ns=stat.st_mtime_ns)
            put_whole(self._noted, msgspec.json.encode(noted), lasting=False)
        except OSError as error:
            damaged(f"{self.path} cannot be read ({error.strerror or error})")
            return None
        return noted

    @contextmanager
    def locked(self, awaits: Callable[[str], None] = lambda path: None) -> Generator[None]:
        """Be the only process of this host that builds these tokens; waits for another one that does.

        Args:
            awaits: Told which lock it is waited for.

        Raises:
            StorageError: The folder cannot be written.
        """
        path = self.path.with_suffix(".lock")
        try:
            make_directory(self._folder)
            try:
                descriptor = lock(path, waits=False)
            except BlockingIOError:
                awaits(str(path))
                descriptor = lock(path)
        except OSError as error:
            raise self.cannot_write(error) from error
        try:
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def begin(self) -> Generator[DurableFile]:
        """Give the file to write tokens to, under the lock; `finish` puts it into place.

        Raises:
            StorageError: It cannot be written.
        """
        unfinished = self._unfinished
        try:
            with DurableFile(unfinished) as file:
                yield file
        except OSError as error:
            raise self.cannot_write(error) from error
        finally:
            unfinished.unlink(missing_ok=True)

    def finish(self, file: DurableFile, found: CachedTokens) -> CachedTokens:
        """Force the tokens to the disk, and let them be found.

        Args:
            found: What is known of them but for the last three.

        Raises:
            OSError: That failed, or something else than was written is read back.
        """
        digest = file.finish()
        modified_ns = self._unfinished.stat().st_mtime_ns
        self._noted.unlink(missing_ok=True)
        self._unfinished.replace(self.path)
        sync_directory(self._folder)
        found = msgspec.structs.replace(
            found, size_bytes=digest.size_bytes, sha256=digest.sha256, modified_ns=modified_ns
        )
        put_whole(self._noted, msgspec.json.encode(found), lasting=True)
        return found

    def cannot_write(self, error: OSError) -> StorageError:
        """The error of tokens that cannot be kept."""
        reason = said_and_remedy(error, self._folder, "choose another place by data.cache_dir")
        return StorageError(f"cannot write {self._folder} {reason}")

    @property
    def _unfinished(self) -> Path:
        return self.path.with_suffix(".unfinished")


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
