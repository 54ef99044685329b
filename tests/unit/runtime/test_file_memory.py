"""Memory in files: what is left is not in memory, what is gone leaves nothing, a full disk says so at once."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
from tests.linux_calls import needs

from shoal import file_thread
from shoal.errors import InvariantViolation
from shoal.runtime import file_memory
from shoal.runtime.file_memory import file_room, mapped
from shoal.runtime.linux_calls import LinuxCall

MIB = 1 << 20
linux = needs(LinuxCall.FILE_MEMORY, "nothing lies in files")


def file_bytes() -> int:
    """Bytes of files that this process has in its memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssFile:", "RssShmem:")))


@linux
def test_what_is_left_is_not_in_memory_and_has_its_values(tmp_path: Path) -> None:
    memories = [mapped(tmp_path, 32 * MIB) for _ in range(2)]
    assert not any(tmp_path.iterdir()), "it has no name"
    starts, before = [ctypes.addressof(memory) for memory in memories], file_bytes()
    for start in starts:
        ctypes.memset(start, ord("x"), 32 * MIB)
    assert file_bytes() - before >= 60 * MIB
    file_memory.leave(starts[0], 32 * MIB)
    assert file_bytes() - before <= 36 * MIB
    file_memory.leave(starts[1] + 5000, 16 * MIB)  # a part, which begins within a page
    assert file_bytes() - before <= 20 * MIB
    assert all(bytes(memory) == b"x" * (32 * MIB) for memory in memories)


@linux
def test_a_file_takes_no_descriptor_and_is_gone_with_the_last_view_of_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = mapped(tmp_path, 8 * MIB)
    start, view = ctypes.addressof(memory), memoryview(memory)
    assert (len(os.listdir("/proc/self/fd")), _lies_there(start, tmp_path)) == (before, True)
    del memory
    assert (file_memory.is_mapped(start), _lies_there(start, tmp_path)) == (True, True)
    del view
    assert (file_memory.is_mapped(start), _lies_there(start, tmp_path)) == (False, False)


@linux
def test_a_forked_process_has_none_of_it(tmp_path: Path) -> None:
    memory = mapped(tmp_path, MIB)
    lines = Path("/proc/self/smaps").read_text().split(f"{ctypes.addressof(memory):x}-")[1].splitlines()
    [flags] = [line.split() for line in lines if line.startswith("VmFlags:")][:1]
    assert "dc" in flags, "not copied by fork, see proc_pid_smaps(5)"


def _lies_there(start: int, folder: Path) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.startswith(f"{start:x}-") and str(folder) in line for line in lines)


@linux
def test_all_room_is_taken_at_once_and_a_disk_without_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[int]()

    def full(_fd: int, _offset: int, size: int) -> None:
        taken.append(size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        mapped(tmp_path, MIB)
    assert taken == [MIB]


@linux
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("ext4", ""),
        ("tmpfs", "in memory"),
        ("ramfs", "in memory"),
        ("nfs4", "another machine"),
        ("fuse.sshfs", "another"),
    ],
)
def test_files_lie_only_on_a_disk_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    _mount(tmp_path, monkeypatch, kind)
    room, reason = file_room(tmp_path)
    assert (room > 0, bool(reason)) == (not why, bool(why))
    assert why in reason


@linux
def test_the_room_is_a_share_of_what_is_free_and_no_more_than_the_user_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mount(tmp_path, monkeypatch, "ext4")
    room, _ = file_room(tmp_path)
    assert file_room(tmp_path, 4)[0] == pytest.approx(room // 4, rel=0.05)
    assert file_room(tmp_path, 1, 1000) == (1000, "")
    assert file_room(tmp_path, 1, 0) == (0, "servers.max_disk_bytes is 0")
    assert file_room(tmp_path / "none") == (0, "No such file or directory")


def _mount(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Have a folder be on a disk of this kind."""
    mounts = folder / "mounts"
    mounts.write_text(f"any {folder} {kind} rw 0 0\n")
    monkeypatch.setattr(file_thread, "_MOUNTS", mounts)


@pytest.mark.usefixtures("portable")
def test_a_system_without_the_calls_has_no_room(tmp_path: Path) -> None:
    assert file_room(tmp_path)[0] == 0
    with pytest.raises(InvariantViolation, match="no room"):
        mapped(tmp_path, 1)
