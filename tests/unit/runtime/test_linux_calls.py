"""What a system has, and that everything can be forced to do without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime import durable_files
from shoal.runtime.durable_files import exchange, put_whole
from shoal.runtime.linux_calls import FORCE_PORTABLE, LinuxCall, available_calls, has
from shoal.runtime.long_turns import take_long_turns
from shoal.runtime.process_control import set_process_title, set_subreaper
from shoal.runtime.sealed_memory import has_memfd, sealed_memfd

_SAY_CALLS = "from shoal.runtime.linux_calls import available_calls; print(len(available_calls()))"


@pytest.mark.skipif(sys.platform != "linux", reason="it is Linux that has them")
@pytest.mark.skipif(os.environ.get(FORCE_PORTABLE) == "1", reason="the suite runs without them")
def test_linux_has_what_it_is_known_for() -> None:
    missing = set(LinuxCall) - available_calls()
    assert missing <= {LinuxCall.PIDFD}, "an old kernel may lack this one"


@pytest.mark.usefixtures("portable")
def test_a_process_that_is_forced_has_none_and_neither_have_those_that_it_starts() -> None:
    assert available_calls() == frozenset()
    said = subprocess.run([sys.executable, "-c", _SAY_CALLS], capture_output=True, text=True, check=True).stdout
    assert said == "0\n"


@pytest.mark.usefixtures("portable")
def test_what_cannot_be_done_otherwise_is_not_done_and_says_so(tmp_path: Path) -> None:
    assert not has_memfd()
    with pytest.raises(Exception, match="no memfd"):
        sealed_memfd("any", 1)
    assert not set_subreaper(True)
    assert not take_long_turns()
    comm = Path("/proc/self/comm")
    before = comm.read_text() if comm.exists() else ""
    set_process_title("client", 0)
    assert not comm.exists() or comm.read_text() == before
    one, other = tmp_path / "one", tmp_path / "other"
    put_whole(one, b"1", lasting=True)
    put_whole(other, b"2", lasting=True)
    assert not exchange(one, other)
    assert (one.read_bytes(), other.read_bytes()) == (b"1", b"2")


def test_what_the_fixture_forces_ends_with_its_test() -> None:
    assert has(LinuxCall.PROC) == (sys.platform == "linux" and os.environ.get(FORCE_PORTABLE) != "1")


@pytest.mark.parametrize("disk_can", [True, False])
def test_a_file_is_forced_past_the_cache_of_the_disk_where_fsync_leaves_it_there(
    disk_can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[str] = []

    def full_sync(_descriptor: int, command: int) -> int:
        assert command == 51
        if not disk_can:
            raise OSError("a disk of another machine")
        forced.append("full")
        return 0

    monkeypatch.setattr(durable_files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(durable_files.fcntl, "fcntl", full_sync)
    monkeypatch.setattr(durable_files.os, "fsync", lambda _descriptor: forced.append("fsync"))
    put_whole(tmp_path / "file", b"1", lasting=True)
    # The file, and the folder that has it.
    assert forced == ["full" if disk_can else "fsync"] * 2
