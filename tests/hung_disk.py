"""A disk of a network, and one that does not answer since its server is gone: a write returns when it does again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shoal.file_thread


def far_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are opened from now on lie on the disk of a network."""
    monkeypatch.setattr(shoal.file_thread, "always_answers", lambda _path: False)


class HungDisk:
    """Stands in for `os.write`.

    Attributes:
        error: what writes raise once the disk answers; None: they succeed.
    """

    def __init__(self) -> None:
        self._write = os.write
        self._answers = threading.Event()
        self.error: OSError | None = None

    def answers(self) -> None:
        """From now on it does."""
        self._answers.set()

    def write(self, descriptor: int, content: bytes) -> int:
        """Write, once the disk answers."""
        self._answers.wait()
        if self.error is not None:
            raise self.error
        return self._write(descriptor, content)


@contextmanager
def hung_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    """All disks of this process do not answer; at the latest at the end they do."""
    disk = HungDisk()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", disk.write)
        try:
            yield disk
        finally:
            disk.answers()
