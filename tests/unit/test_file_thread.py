"""What is done with a file in a thread: it is done when its caller goes on, unless the disk does not answer."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import file_thread
from shoal.errors import StorageError
from shoal.file_thread import FileThread, number_of, remedy, remedy_of, said_by_disk


class Disk:
    """Writes numbers down, once it answers."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.written: list[int] = []
        self.late = 0
        self.thread = FileThread("written", self.is_late)

    def is_late(self) -> None:
        self.late += 1

    def write(self, number: int) -> bool:
        """Return whether it was done at once."""

        def write() -> None:
            self.answers.wait()
            self.written.append(number)

        return self.thread.do(write).done()


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()
    disk.thread.end()


def test_what_is_written_is_written_when_its_writer_goes_on(disk: Disk) -> None:
    for number in range(100):
        assert disk.write(number)
        assert disk.written[-1] == number
    assert (disk.late, disk.thread.hangs) == (0, False)


def test_an_error_is_raised_where_the_result_is_taken_and_the_next_write_is_done(disk: Disk) -> None:
    def fail() -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        disk.thread.do(fail).result()
    assert disk.thread.do(lambda: 7).result() == 7


def test_a_disk_that_does_not_answer_keeps_nobody_is_told_once_and_gets_all_in_its_order(disk: Disk) -> None:
    disk.answers.clear()
    assert [disk.write(number) for number in range(20)] == [False] * 20
    assert (disk.late, disk.thread.hangs, disk.thread.num_waiting, disk.written) == (1, True, 20, [])
    disk.answers.set()
    disk.thread.end()
    assert disk.written == [*range(20)]
    assert not disk.thread.hangs
    assert disk.write(20), "it is as fast as before, so that writes are done at once again"
    disk.answers.clear()
    assert not disk.write(21)
    assert disk.late == 2


def test_the_thread_of_a_file_that_is_closed_ends_and_another_write_starts_it_again(disk: Disk) -> None:
    for number in range(2):
        assert disk.write(number)
        assert "written" in {thread.name for thread in threading.enumerate()}
        disk.thread.end()
        assert "written" not in {thread.name for thread in threading.enumerate()}


def test_without_a_thread_its_writer_writes_itself(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert disk.write(1)
    assert disk.written == [1]


def test_a_file_on_a_disk_of_this_machine_is_written_by_who_writes(tmp_path: Path) -> None:
    assert file_thread.always_answers(tmp_path / "missing" / "lines")
    thread = FileThread("near", path=tmp_path / "lines")
    assert thread.do(threading.current_thread).result() is threading.current_thread()
    with pytest.raises(OSError, match="no space"):
        thread.do(_fail).result()
    thread.end()


def _fail() -> None:
    raise OSError("no space")


def test_what_is_no_file_may_not_answer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert not file_thread.always_answers(tmp_path / "pipe")
    assert FileThread("far", path=tmp_path / "pipe").do(threading.current_thread).result() is not (
        threading.current_thread()
    )


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        *(("nfs4", False), ("cifs", False), ("autofs", False), ("fuse.sshfs", False)),
        *(("fuse.fuse-overlayfs", True), ("ext4", True)),
    ],
)
def test_the_disk_of_a_network_may_not_answer_wherever_it_is_mounted_and_whatever_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, answers: bool
) -> None:
    far = tmp_path / "with a space"
    far.mkdir()
    (tmp_path / "link").symlink_to(far)
    mounts = tmp_path / "mounts"
    escaped = str(far).replace(" ", r"\040")
    stick = b"/dev/sdb /media/\xe9t\xe9 vfat rw 0 0\n"  # a name that is no text in UTF-8
    mounts.write_bytes(b"none / tmpfs rw 0 0\n" + stick + f"server:/share {escaped} {kind} rw 0 0\n".encode())
    monkeypatch.setattr(file_thread, "_MOUNTS", mounts)
    assert file_thread.always_answers(far / "logs" / "lines") is answers
    assert file_thread.always_answers(tmp_path / "link" / "lines") is answers
    assert file_thread.always_answers(tmp_path / "lines")


def test_what_is_mounted_where_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/share {tmp_path}/far nfs4 rw 0 0\n")
    monkeypatch.setattr(file_thread, "_MOUNTS", mounts)
    assert not file_thread.always_answers(tmp_path / "far" / "lines")
    mounts.unlink()
    assert not file_thread.always_answers(tmp_path / "far" / "others")
    assert file_thread.always_answers(tmp_path / "lines")


@pytest.mark.parametrize(
    ("code", "inodes", "blocks", "said"),
    [
        (errno.ENOSPC, 0, 9, "there is space, and no inode for another file: remove some files there"),
        (errno.ENOSPC, 9, 0, "No space left on device: free space there"),
        (errno.ENOSPC, 0, 0, "No space left on device: free space there"),
        (errno.EROFS, 0, 9, "Read-only file system: mount it for writing"),
    ],
)
def test_of_a_disk_that_takes_no_file_it_is_said_what_it_lacks(
    code: int, inodes: int, blocks: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def statvfs(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_files=100, f_favail=inodes, f_bavail=blocks)

    monkeypatch.setattr(os, "statvfs", statvfs)
    error = OSError(code, os.strerror(code))
    place = tmp_path / "not" / "there"
    assert f"{said_by_disk(error, place)}: {remedy(error, place)}".startswith(said)
    assert set(asked) == {tmp_path} & ({tmp_path} if code == errno.ENOSPC else set())


def test_each_error_of_a_disk_has_a_remedy_of_its_own_and_another_disk_beside_it() -> None:
    told = {
        errno.ENOSPC: "free space there",
        errno.EDQUOT: "quota raised",
        errno.EROFS: "mount it for writing",
        errno.EIO: "see in `dmesg` what fails",
        errno.EACCES: "let this user write there",
        errno.EPERM: "let this user write there",
        errno.ESTALE: "why it does not answer",
        errno.ENOENT: "who has removed the folder",
        errno.EINVAL: "see whether there is space, and whether the disk is sound",
    }
    for number, what in told.items():
        said = remedy(OSError(number, os.strerror(number)), "/log", "take another disk")
        assert what in said, said
        assert said.endswith(", or take another disk")
        assert ("free space" in said) is (number == errno.ENOSPC)
    unnamed = OSError("only 3 of 10 bytes were written; is the disk full?")
    assert remedy(unnamed, "/log") == told[errno.EINVAL]


def test_what_follows_from_an_error_of_a_disk_has_its_number() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    follows = StorageError("no checkpoint")
    follows.__cause__ = full
    assert [number_of(each) for each in (full, follows)] == [errno.ENOSPC, errno.ENOSPC]
    assert (
        remedy_of(number_of(StorageError("nobody answers")))
        == "see whether there is space, and whether the disk is sound"
    )


def test_a_disk_that_counts_no_inodes_and_one_that_says_nothing_are_taken_at_their_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(path: Path) -> SimpleNamespace:
        raise OSError(errno.EIO, "no answer")

    error = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "log"))
    monkeypatch.setattr(os, "statvfs", silent)
    assert said_by_disk(error, "") == "No space left on device"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=0, f_favail=0, f_bavail=9))
    assert said_by_disk(error, "") == "No space left on device"
