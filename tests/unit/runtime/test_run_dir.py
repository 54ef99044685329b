"""The runtime directory: private, locked, cleaned up after dead runs."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.runtime.file_locks import locked
from shoal.runtime.run_dir import FoundDir, RunDir, RunNote, found_dirs, keep_directory, remove_dead_dir, socket_path


def test_the_directory_is_private_short_and_gone_at_the_end(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        assert run_dir.path.parent == tmp_path / f"shoal-{os.getuid()}"
        assert len(run_dir.path.name) == 8
        for path in (run_dir.path, run_dir.path.parent):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (run_dir.path / "server-0").touch()
    assert not run_dir.path.exists()


def test_directories_of_dead_runs_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    with RunDir(tmp_path) as living:
        dead = living.path.parent / "0badcafe"
        dead.mkdir()
        (dead / "server-0").touch()
        with RunDir(tmp_path) as other:
            assert not dead.exists()
            assert living.path.is_dir()
            assert other.path != living.path
        assert living.path.is_dir()


def test_a_port_that_one_run_has_claimed_no_other_gets_until_it_has_ended(tmp_path: Path) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.bind(("0.0.0.0", 0))
        port = probe.getsockname()[1]
    # They need not know each other.
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
    with RunDir(tmp_path / "a") as second:
        with RunDir(tmp_path / "b") as first:
            assert first.claim_port(port)
            assert not second.claim_port(port)
        assert second.claim_port(port)


def test_a_folder_that_one_run_has_claimed_no_other_gets_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    with RunDir(tmp_path) as second:
        with RunDir(tmp_path) as first:
            assert first.claim_folder(folder)
            assert not second.claim_folder(folder)
        assert second.claim_folder(folder)

        def has_no_locks(_descriptor: int, _operation: int) -> None:
            raise OSError(errno.EBADF, "a folder of a file server")

        monkeypatch.setattr("shoal.runtime.run_dir.fcntl.flock", has_no_locks)
        assert second.claim_folder(tmp_path)


def test_a_directory_that_was_removed_meanwhile_is_closed_without_error(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.close()


def test_a_socket_path_that_is_too_long_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        assert run_dir.socket_path("s") == run_dir.path / "s"
    assert socket_path(Path("/tmp"), "x" * 98) == Path("/tmp") / ("x" * 98)
    with pytest.raises(ConfigError, match=r"has 104 bytes.*XDG_RUNTIME_DIR"):
        socket_path(Path("/tmp"), "x" * 99)


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_parent_that_somebody_else_could_have_made_is_refused(kind: str, tmp_path: Path) -> None:
    root = tmp_path / f"shoal-{os.getuid()}"
    if kind == "open to others":
        root.mkdir()
        root.chmod(0o755)
    elif kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.touch()
    with pytest.raises(ConfigError, match="runtime directory"):
        RunDir(tmp_path)
    assert found_dirs(tmp_path) == [], "what stands in the way of a new run hides none, and fails no list of them"


def test_the_users_runtime_directory_is_used_if_it_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDir() as run_dir:
        assert run_dir.path.is_relative_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for unusable in (str(tmp_path / "missing"), ".", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        with RunDir() as run_dir:
            assert run_dir.path.parent.parent == Path("/tmp")


def test_what_is_gone_with_the_login_is_not_used_if_a_run_can_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tmp = tmp_path / "logins" / str(os.getuid()), tmp_path / "tmp"
    for path in (own, tmp):
        path.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr("shoal.runtime.run_dir._OF_LOGINS", tmp_path / "logins")
    monkeypatch.setattr("shoal.runtime.run_dir._TMP", tmp)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    with RunDir() as outlives:
        assert outlives.path.is_relative_to(tmp)
        with RunDir(own) as before:  # of an earlier version
            assert [found.path for found in found_dirs()] == [before.path, outlives.path]
    (tmp / f"shoal-{os.getuid()}" / "lock").unlink()
    (tmp / f"shoal-{os.getuid()}").rmdir()
    (tmp / f"shoal-{os.getuid()}").touch()  # by somebody else
    with RunDir() as run_dir:
        assert run_dir.path.is_relative_to(own)


def test_other_commands_find_a_run_by_its_note_and_know_whether_it_lives(tmp_path: Path) -> None:
    note = RunNote(
        run_id="gpt-1", hosts="client", launcher_pid=os.getpid(), begun_unix_s=1.5, log_dir="/logs", socket="/s"
    )
    assert found_dirs(tmp_path) == []
    with RunDir(tmp_path) as run_dir:
        assert found_dirs(tmp_path) == [FoundDir(run_dir.path, None, is_alive=True)]
        run_dir.announce(note)
        dead = run_dir.path.parent / "zz"
        dead.mkdir()
        (dead / "run.json").write_text("{")
        assert found_dirs(tmp_path) == [
            FoundDir(run_dir.path, note, is_alive=True),
            FoundDir(dead, None, is_alive=False),
        ]
        assert not remove_dead_dir(run_dir.path)
        assert remove_dead_dir(dead)
        assert found_dirs(tmp_path) == [FoundDir(run_dir.path, note, is_alive=True)]


def test_a_run_lives_whatever_is_cleared_out_of_its_directory(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        for path in run_dir.path.iterdir():
            path.unlink()  # as what nobody has touched for days is cleared out of /tmp
        with RunDir(tmp_path):
            assert run_dir.path.is_dir()
        assert not remove_dead_dir(run_dir.path)


def test_a_run_whose_directory_is_cleared_away_has_it_again_and_nobody_takes_it_for_a_dead_one(tmp_path: Path) -> None:
    note = RunNote(run_id="gpt-1", hosts="servers", launcher_pid=1, begun_unix_s=1.5, log_dir="/logs")
    with RunDir(tmp_path) as run_dir:
        run_dir.announce(note)
        alive = [FoundDir(run_dir.path, note, is_alive=True)]
        run_dir.restore()
        assert found_dirs(tmp_path) == alive
        shutil.rmtree(run_dir.path.parent)
        kept = keep_directory(run_dir.path)  # by a role, which misses its socket
        assert found_dirs(tmp_path) == [FoundDir(run_dir.path, None, is_alive=True)]
        run_dir.restore()
        os.close(kept)  # that role has ended
        assert found_dirs(tmp_path) == alive
        with RunDir(tmp_path):
            assert not remove_dead_dir(run_dir.path)
        (run_dir.path / "run.json").unlink()
        run_dir.restore()
        assert found_dirs(tmp_path) == alive
        with locked(run_dir.path.parent / "lock"):
            shutil.rmtree(run_dir.path)
            with pytest.raises(BlockingIOError):
                run_dir.restore()
        run_dir.restore()
        assert found_dirs(tmp_path) == alive
    assert found_dirs(tmp_path) == []


def test_a_directory_that_cannot_be_made_again_says_where(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        shutil.rmtree(run_dir.path)
        run_dir.path.touch()
        with pytest.raises(ConfigError, match=f"cannot make the runtime directory {run_dir.path}: File exists"):
            run_dir.restore()


def test_a_directory_whose_lock_cannot_be_looked_at_is_nobody_elses_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir(tmp_path) as run_dir:
        unclear = run_dir.path.parent / "zz"
        unclear.mkdir()
        opened = os.open

        def refused(path: Path, *how: int) -> int:
            if path == unclear:
                raise OSError(errno.EMFILE, "Too many open files")
            return opened(path, *how)

        monkeypatch.setattr(os, "open", refused)
        assert not remove_dead_dir(unclear)
        with RunDir(tmp_path):
            assert unclear.is_dir()
