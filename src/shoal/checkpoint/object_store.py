"""Checkpoints in an object store, `s3://bucket/prefix`, through fsspec and s3fs (`pip install shoal[cloud]`).

There is no rename and no folder there: an object is there when it was written to its end, and a checkpoint when its
manifest is, which is written last and removed first. The store answers for the bytes that it has acknowledged: s3fs
sends a checksum with them, and their number is compared here; nothing is downloaded again.

Credentials come from where the AWS tools look for them (environment, profile, instance), never from a location, and no
message has any. Each request ends within a bounded time and number of bytes (`object_requests`), so a store that cannot
be reached is one error after seconds, and one that never comes to an end is one as well.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from shoal.checkpoint.manifest import MANIFEST
from shoal.checkpoint.object_requests import bounded_session, content_of, listing
from shoal.errors import ConfigError, LocalProtocolError, StorageError
from shoal.runtime.durable_files import FileDigest

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SCHEME: Final = "s3://"
_TIMEOUTS: Final = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 1}}
_ATTEMPTS: Final = 2
"""Of a request, by s3fs: a blip is got over, and who waits longer does not help a store that is away."""
_SECRETS: Final = re.compile(r"(?<=//)[^/@\s\"']*@|(?<=X-Amz-)[\w-]+=[^&\s\"']+|(?<=AWSAccessKeyId=)[^&\s\"']+")
"""What in an error's text may be a credential: in front of a host, and in a signed URL."""


class ObjectPlace:
    """A prefix of a bucket. A `places.CheckpointPlace`.

    Attributes:
        store: The store as a file system of fsspec.

    Raises:
        ConfigError: It is no such location, or s3fs is not installed.
    """

    def __init__(self, location: str) -> None:
        bucket, _, prefix = location.removeprefix(_SCHEME).partition("/")
        if not location.startswith(_SCHEME) or not bucket or "@" in bucket or "?" in location:
            # The location is not in the message: there may be a key in it.
            raise ConfigError(
                "the place of checkpoints is a folder or s3://bucket/prefix, without a user or a query; credentials "
                "are taken from the environment, as the AWS tools take them"
            )
        self.location = f"{_SCHEME}{bucket}/{prefix}".rstrip("/")
        self._root = f"{bucket}/{prefix}".rstrip("/")
        try:
            s3fs = importlib.import_module("s3fs")
        except ImportError as error:
            raise ConfigError(f"{location}: s3fs is not installed; pip install 'shoal[cloud]'") from error
        # What others have cached is not what is there.
        config = {**_TIMEOUTS, "http_session_cls": bounded_session}
        options = {"config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
        self.store: Any = s3fs.S3FileSystem(**options)
        self.store.retries = _ATTEMPTS

    def folders(self) -> list[str]:
        try:
            entries = self._entries(self._root)
        except FileNotFoundError:
            return []
        names = sorted(_name(entry["Prefix"]) for entry in entries if "Prefix" in entry)
        return [name for name in names if name[:1] not in ("", ".")]

    def sizes(self, folder: str) -> dict[str, int]:
        return {_name(entry["Key"]): int(entry["Size"]) for entry in self._files(folder)}

    def modified_unix_s(self, folder: str) -> float:
        return max((entry["LastModified"].timestamp() for entry in self._files(folder)), default=0.0)

    def read(self, folder: str, name: str, size_bytes: int) -> bytes:
        if not size_bytes:
            return b""  # of nothing no range can be asked for
        with self.told("read"):
            return content_of(self.store, self._path(folder, name), size_bytes + 1)

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def draft(self, folder: str) -> ObjectDraft:
        self.remove(folder)
        return ObjectDraft(self, folder)

    def remove(self, folder: str, begun: Callable[[], None] = lambda: None) -> None:
        found = self._found(folder)
        with self.told("remove"):
            for name in sorted(found, key=lambda name: name != MANIFEST):
                self.store.rm_file(self._path(folder, name))
                if name == MANIFEST:
                    begun()

    def remove_leftovers(self) -> None:
        """Nothing has a hidden name. Uploads that were never ended: the bucket's lifecycle rule removes them."""

    def free_bytes(self) -> int | None:
        return None

    def create(self, folder: str, name: str) -> ObjectFile:
        """Begin an object.

        Raises:
            StorageError: The store cannot be used.
        """
        return ObjectFile(self, self._path(folder, name))

    @contextmanager
    def told(self, doing: str) -> Generator[None]:
        """Make one error of what the libraries raise.

        Raises:
            StorageError: The store cannot be reached, or refuses.
            FileNotFoundError: There is no such object.
        """
        botocore, aiohttp = importlib.import_module("botocore.exceptions"), importlib.import_module("aiohttp")
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(2, "there is no such object", self.location) from error
        except (OSError, botocore.BotoCoreError, botocore.ClientError, aiohttp.ClientError) as error:
            said = _SECRETS.sub("...", str(error) or type(error).__name__)
            # Without the error itself: its text is not ours.
            raise StorageError(
                f"cannot {doing} checkpoints in {self.location} ({type(error).__name__}: {said}): look at the network, "
                "the bucket and the credentials in the environment"
            ) from None

    def _files(self, folder: str) -> list[dict[str, Any]]:
        # Of a prefix there may be an object of no bytes with the folder's own name: it is none of its files.
        entries = self._entries(f"{self._root}/{folder}")
        return [entry for entry in entries if not entry.get("Key", "/").endswith("/")]

    def _entries(self, path: str) -> list[dict[str, Any]]:
        with self.told("list"):
            found = listing(self.store, path)
            if not found:
                raise FileNotFoundError
        return found

    def _found(self, folder: str) -> dict[str, int]:
        try:
            return self.sizes(folder)
        except FileNotFoundError:
            return {}

    def _path(self, folder: str, name: str) -> str:
        return f"{self._root}/{folder}/{name}"


class ObjectFile:
    """An object that is being written from its beginning to its end. A `tensor_file.OutFile`."""

    def __init__(self, place: ObjectPlace, path: str) -> None:
        self._place, self._path = place, path
        with place.told("write"):
            self._file: Any = place.store.open(path, "wb")
        self._hash, self._size_bytes = hashlib.sha256(), 0

    def write(self, content: Buffer, offset: int | None = None) -> None:
        if offset is not None and offset != self._size_bytes:
            raise LocalProtocolError(f"{self._path} is written at {offset}, it has {self._size_bytes} bytes")
        view = memoryview(content)
        with self._place.told("write"):
            self._file.write(view)
        self._hash.update(view)
        self._size_bytes += view.nbytes

    def finish(self) -> FileDigest:
        with self._place.told("write"):
            self._file.close()
            found = int(self._place.store.info(self._path)["size"])
        self._file = None
        if found != self._size_bytes:
            raise StorageError(f"{self._place.location} has {found} of {self._size_bytes} bytes that it has accepted")
        return FileDigest(self._size_bytes, self._hash.hexdigest())

    def close(self) -> None:
        if self._file is not None:
            with self._place.told("leave"):
                # Or its finaliser would upload what it has.
                self._file.closed = True
                self._file.discard()
            self._file = None


class ObjectDraft:
    """A checkpoint that is being uploaded. A `places.Draft`."""

    def __init__(self, place: ObjectPlace, folder: str) -> None:
        self._place, self._folder = place, folder
        self._is_in_place = False

    def create(self, name: str) -> ObjectFile:
        return self._place.create(self._folder, name)

    def write(self, name: str, content: Buffer) -> FileDigest:
        file = self.create(name)
        try:
            file.write(content)
            return file.finish()
        finally:
            file.close()

    def put_into_place(self) -> None:
        """The manifest was written last: it is."""
        self._is_in_place = True

    def discard(self) -> None:
        """What was uploaded stays if the store is away: it is no checkpoint, and is removed when the next one is."""
        if self._is_in_place:
            return
        try:
            self._place.remove(self._folder)
        except StorageError:
            return


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
