"""Memory in files: what is left is not in memory, what is gone leaves nothing, a full disk says so at once."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
from tests.linux_calls import needs

from shoal.errors import InvariantViolation
from shoal.runtime.file_memory import FileMemory, file_room_bytes
from shoal.runtime.linux_calls import LinuxCall

MIB = 1 << 20


def mapped_bytes() -> int:
    """Bytes of files that this process has in its memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile:", "RssShmem:")))


@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
def test_what_is_left_is_not_in_memory_and_has_its_values(tmp_path: Path) -> None:
    files = FileMemory(tmp_path)
    first, second = files.map(32 * MIB), files.map(32 * MIB)
    assert not any(tmp_path.iterdir()), "it has no name"
    before = mapped_bytes()
    for mapping in (first, second):
        mapping[:] = b"x" * len(mapping)
    assert mapped_bytes() - before >= 60 * MIB
    starts = sorted(files._mapped)
    files.leave(starts[0], 32 * MIB)
    assert mapped_bytes() - before <= 36 * MIB
    files.leave(starts[1] + 5000, 16 * MIB)  # a part, which begins within a page
    assert mapped_bytes() - before <= 20 * MIB
    files.leave(id(files), 1)  # what lies elsewhere stays there
    assert first[:] == second[:] == b"x" * (32 * MIB)


@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
def test_a_file_is_gone_with_its_memory_and_all_its_room_is_taken_at_once(tmp_path: Path) -> None:
    files, before = FileMemory(tmp_path), len(os.listdir("/proc/self/fd"))
    mapping = files.map(8 * MIB)
    [kept] = [os.fstat(int(fd)) for fd in os.listdir("/proc/self/fd") if _is_nameless(int(fd), tmp_path)]
    assert kept.st_blocks * 512 >= 8 * MIB, "whoever writes later needs none"
    del mapping
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def _is_nameless(fd: int, folder: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))
    except OSError:
        return False


@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
def test_a_disk_without_room_refuses_it_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        FileMemory(tmp_path).map(MIB)


@needs(LinuxCall.FILE_MEMORY, "nothing lies in files")
@pytest.mark.parametrize(("kind", "has_room"), [("ext4", True), ("tmpfs", False)])
def test_a_folder_that_lies_in_memory_has_no_room(tmp_path: Path, kind: str, has_room: bool) -> None:
    device = tmp_path.stat().st_dev
    number, mounts = f"{os.major(device)}:{os.minor(device)}", tmp_path / "mountinfo"
    mounts.write_text(
        f"24 1 {number} / /any rw,relatime shared:1 - {kind} /dev/any rw\n25 1 0:0 / /proc rw - tmpfs a rw\n"
    )
    room = file_room_bytes(tmp_path, 1, mounts)
    assert (room > 0) == has_room
    assert abs(file_room_bytes(tmp_path, 4, mounts) - room // 4) <= room // 100
    assert file_room_bytes(tmp_path / "none", 1, mounts) == 0
    assert file_room_bytes(tmp_path, 1, tmp_path / "none") == 0, "who knows"


@pytest.mark.usefixtures("portable")
def test_a_system_without_the_calls_has_no_room(tmp_path: Path) -> None:
    assert file_room_bytes(tmp_path) == 0
    with pytest.raises(InvariantViolation, match="no room"):
        FileMemory(tmp_path).map(1)
