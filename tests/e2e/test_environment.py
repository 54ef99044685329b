"""What surrounds a run fails: a disk is full, or no more files may be opened. What follows is clear, and said."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ENDLESS, FEW, PACE, SMALL, START_S, Launched, launched, until
from tests.e2e.test_faults import summed_up

pytestmark = pytest.mark.timeout(600)


def test_a_run_that_may_not_open_enough_files_ends_and_says_how_to_allow_more(tmp_path: Path) -> None:
    few = ("sh", "-c", 'ulimit -n 30 && exec "$@"', "sh")
    with launched(tmp_path, *FEW, prefix=few) as run:
        assert run.ends(START_S) == 1, run.output
        run.leaves_nothing()
        assert "Too many open files: this process may have 30 files and connections open" in run.output
        assert "`ulimit -n 65536`" in run.output
        assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_full_disk_at_the_log_of_one_role_costs_that_log_and_nothing_else(tmp_path: Path) -> None:
    with launched(tmp_path, *ENDLESS) as run:
        run.saw("client_0", "round.recorded", round=1)
        assert run.log_dir is not None
        log = run.log_dir / "server_1.log"
        # The next process of this role opens it anew; whatever is written there meets a full disk.
        log.rename(log.with_suffix(".before"))
        log.symlink_to("/dev/full")
        os.kill(run.pid_of("server:1"), signal.SIGKILL)
        until(
            lambda: (
                re.search(r"server 1@\S+ serves", run.output) or _num_starts(run.events("launcher", "role.started")) > 1
            ),
            START_S,
            "another server",
        )
        _trains_on(run, num_rounds=3)
        until(lambda: "cannot write to its disk (log): free space there" in run.output, START_S, "the incident")
        said = until(lambda: _text(run.log_dir / "server_1.out"), START_S, "what the server says of its log")
        log.unlink()
        log.with_suffix(".before").rename(log)
        run.interrupt()
        assert run.ends(END_S) == 130, run.output
        summary = summed_up(run)
    assert said.count("No space left on device): free space there; the run goes on without this log") == 1
    assert "Traceback" not in said
    assert [failover["kind"] for failover in summary["failovers"]] == ["server"]
    assert [incident["cause"] for incident in summary["incidents"]] == ["ended", "disk full"]


@pytest.mark.slow
def test_a_disk_that_does_not_answer_where_one_role_logs_keeps_that_role_from_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *ENDLESS) as run:
        run.saw("client_0", "round.recorded", round=1)
        assert run.log_dir is not None
        log = run.log_dir / "server_1.log"
        log.rename(log.with_suffix(".before"))
        log.with_suffix(".out").unlink()
        for path in (log, log.with_suffix(".out")):
            os.mkfifo(path)  # who opens it waits until somebody reads
        os.kill(run.pid_of("server:1"), signal.SIGKILL)
        until(lambda: "cannot write to its disk (log)" in run.output, START_S, "the incident")
        _trains_on(run, num_rounds=3)
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            until(lambda: "could not write to its disk: over" in run.output, START_S, "its end")
        finally:
            log.unlink()
            log.with_suffix(".before").rename(log)
            run.interrupt()
            assert run.ends(END_S) == 130, run.output
            os.close(reader)
        summary = summed_up(run)
    assert [incident["cause"] for incident in summary["incidents"]] == ["ended", "disk full"]


@pytest.mark.slow
def test_a_client_that_is_started_while_its_disk_does_not_answer_says_so_and_goes_on_when_it_does(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded", round=2)
        assert run.log_dir is not None
        state, client = run.log_dir / "client.state", run.pid_of("client:0")
        os.kill(client, signal.SIGSTOP)  # it writes nothing more
        left = state.read_bytes()
        state.rename(state.with_suffix(".before"))
        os.mkfifo(state)  # who opens it waits until somebody writes
        os.kill(client, signal.SIGKILL)
        until(lambda: "the client waits for its disk: " in run.output, START_S, "what it waits for")
        with state.open("wb") as file:
            state.with_suffix(".before").rename(state)
            file.write(left)
        _trains_on(run, num_rounds=2)
        _loses_nothing(run)
    assert f"{run.log_dir} does not answer for 2 s" in run.output


@pytest.mark.slow
def test_sockets_that_are_cleared_away_keep_nobody_who_is_started_again_from_the_others(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded", round=2)
        for path in run.runtime_dir.iterdir():
            shutil.rmtree(path)
        os.kill(run.pid_of("server:1"), signal.SIGKILL)
        run.saw("client_0", "server.back")
        until(lambda: len([*run.runtime_dir.glob("*/*/run.json")]) == 1, START_S, "the note of the run")
        assert run.log_dir is not None
        listed = _says(run, "ps")
        assert run.log_dir.name in listed
        assert f"left of a dead run: {run.runtime_dir}" not in listed, "`shoal clean` would end its processes"
        assert run.log_dir.name in _says(run, "status", run.log_dir.name)
        _trains_on(run, num_rounds=3)
        _loses_nothing(run)


@pytest.mark.slow
def test_a_folder_that_is_moved_away_costs_its_run_nothing_but_what_was_in_it(tmp_path: Path) -> None:
    flags = ("--diloco.outer-steps=8", "--servers.replicas=1", f"--emulation.call-s={PACE}")
    with launched(tmp_path, *SMALL, *flags) as run:
        run.saw("client_0", "round.recorded", round=2)
        assert run.log_dir is not None
        run.log_dir.rename(tmp_path / "moved")
        assert run.ends(END_S) == 0, run.output
        run.leaves_nothing()
        summary = run.summary()
    assert (summary["outer_rounds"], summary["duplicates"], summary["missing"]) == (8, 0, 0)
    assert summary["rounds_unread"] == [0]
    assert "the summary does without the record of round 0: " in run.output
    assert "Traceback" not in run.output


def _says(run: Launched, *command: str) -> str:
    """Return what a command of shoal says to the user of this run."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(run.runtime_dir)}
    asked = [sys.executable, "-m", "shoal", *command]
    return subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=START_S, check=True).stdout


def _trains_on(run: Launched, num_rounds: int) -> None:
    reached = run.events("client_0", "round.recorded")[-1]["round"]
    run.saw("client_0", "round.recorded", round=reached + num_rounds)


def _loses_nothing(run: Launched) -> None:
    run.interrupt()
    assert run.ends(END_S) == 130, run.output
    summary = summed_up(run)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)


def _num_starts(events: list[dict]) -> int:
    return len([event for event in events if event["role"] == "server:1"])


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _why_impossible() -> str | None:
    if os.geteuid() != 0:
        return "a small disk needs root"
    probe = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return "no file system can be mounted here" if probe.returncode else None


_IMPOSSIBLE = _why_impossible()


@pytest.mark.slow
@pytest.mark.skipif(_IMPOSSIBLE is not None, reason=str(_IMPOSSIBLE))
def test_a_run_waits_for_a_disk_that_has_run_full_and_has_lost_nothing_when_it_goes_on(tmp_path: Path) -> None:
    with small_disk(tmp_path / "logs", "4m") as disk, launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded", round=2)
        ballast = _filled_until_it_waits(disk, run)
        ballast.unlink()
        until(lambda: "the client can write to its disk again" in run.output, START_S, "the end of that")
        said = run.output
        _trains_on(run, num_rounds=2)
        _loses_nothing(run)
    assert said.count("the run waits for its disk") == 1
    assert "(No space left on device)" in said
    assert "free space there, or start again with --log-dir on another disk" in said
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.skipif(_IMPOSSIBLE is not None, reason=str(_IMPOSSIBLE))
def test_a_run_whose_disk_stays_full_can_be_ended_and_resumed(tmp_path: Path) -> None:
    kept = f"--checkpoint-dir={tmp_path / 'kept'}"
    every = "--param-mirror.every-rounds=2"
    with small_disk(tmp_path / "logs", "4m") as disk:
        with launched(tmp_path, *FEW, kept, every) as run:
            run.saw("mirror_0", "checkpoint.written", round=2)
            ballast = _filled_until_it_waits(disk, run)
            run.interrupt()
            assert run.ends(END_S) in (1, 130), run.output
            run.leaves_nothing()
            assert "Traceback" not in run.output
        ballast.unlink()
        # Of the logs, of which a line may be half written, nothing is read here.
        with launched(tmp_path, *FEW, kept, every, "--resume") as run:
            found = until(lambda: re.search(r"its checkpoint of round (\d+)", run.output), START_S, "the checkpoint")
            later = disk / f"{run.require_log_dir().name}/rounds/round_{int(found[1]) + 2:04d}.json"
            until(later.exists, START_S, "two more rounds")
            run.interrupt()
            assert run.ends(END_S) == 130, run.output
            run.leaves_nothing()
            summary = run.summary()
    assert (summary["duplicates"], summary["missing"]) == (0, 0)


@pytest.mark.slow
def test_a_client_that_may_open_no_more_files_goes_on_with_what_it_has_and_says_how_to_allow_more(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded", round=2)
        client = run.pid_of("client:0")
        before = resource.prlimit(client, resource.RLIMIT_NOFILE)
        # So few that no connection may have one of them, and enough for what is written.
        _allow(client, _first_free(client) + 10)
        until(lambda: "may open no more files" in run.output, START_S, "the incident")
        _trains_on(run, num_rounds=3)
        assert "the run waits for its disk" not in run.output
        # None at all: not even a record can be written.
        _allow(client, _first_free(client))
        _until_it_waits(run)
        resource.prlimit(client, resource.RLIMIT_NOFILE, before)
        until(lambda: "the client can write to its disk again" in run.output, START_S, "the end of that")
        _trains_on(run, num_rounds=2)
        until(lambda: "took no more connections: over after" in run.output, START_S, "the end of the incident")
        said = run.output
        _loses_nothing(run)
    assert said.count("may open no more files: it goes on with the connections that it has") == 1
    assert said.count("the run waits for its disk") == 1
    assert "`ulimit -n 65536`" in said
    assert "Traceback" not in run.output


def _filled_until_it_waits(disk: Path, run: Launched) -> Path:
    """Fill a disk, and return what it is full of."""
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        _fill(ballast)
    _until_it_waits(run)
    return ballast


def _until_it_waits(run: Launched) -> None:
    until(lambda: "the run waits for its disk: cannot write" in run.output, START_S, "what it waits for")


def _first_free(process: int) -> int:
    """Return the number that the next file gets: the limit is on these numbers."""
    taken = {int(path.name) for path in Path(f"/proc/{process}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in taken)


def _allow(process: int, num_files: int) -> None:
    _, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    resource.prlimit(process, resource.RLIMIT_NOFILE, (num_files, hard))
