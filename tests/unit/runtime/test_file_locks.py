"""Locks between processes, also where a disk knows none."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from tests.unit.runtime.lockless import without_locks

from shoal.runtime.file_locks import lock, locked


def test_a_file_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "a"):
        with pytest.raises(BlockingIOError):
            lock(tmp_path / "a", waits=False)
        with locked(tmp_path / "b", waits=False):
            pass
    with locked(tmp_path / "a", waits=False):
        pass


def test_on_a_disk_without_locks_a_file_of_this_machine_is_locked_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = without_locks(tmp_path, monkeypatch)
    test_a_file_is_locked_by_one_at_a_time(tmp_path)
    assert len([*near.glob("shoal-*/*.lock")]) == 2


def test_where_somebody_else_may_have_made_the_folder_of_locks_what_the_disk_says_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = without_locks(tmp_path, monkeypatch) / f"shoal-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(OSError, match="Function not implemented"):
        lock(tmp_path / "a")


def test_what_else_is_wrong_with_a_lock_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="Input/output error"):
        lock(tmp_path / "a")
