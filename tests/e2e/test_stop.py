"""Ctrl-C and kill -9 of the launcher at several moments: all is gone, and a new start works.

With `--gone-within 5`, on an idle machine, it is judged as well whether all is gone within the five seconds promised.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ENDLESS, FEW, SMALL, START_S, Launched, launched, until

from shoal.cli.farewell import GRACE_S
from shoal.runtime.process_info import descendants

pytestmark = pytest.mark.timeout(600)

Moment = Callable[[Launched], object]


def reading(run: Launched) -> None:
    """The fork server exists, and the configuration is being read, or is about to be."""
    until(lambda: descendants(run.process.pid), START_S, "fork server")


def preloading(run: Launched) -> None:
    """The run has its log directory, and the fork server imports."""
    until(lambda: run.output.startswith("run sandbox-"), START_S, "the first line of output")


def starting(run: Launched) -> None:
    """The first roles are there, the others are being forked."""
    run.saw("launcher", "role.started", role="server:0")


def joining(run: Launched) -> None:
    """All roles are there and join the DHT."""
    run.saw("launcher", "swarm.open")


def training(run: Launched) -> None:
    """A round has been committed."""
    run.saw("client_0", "round.recorded")


def ending(run: Launched) -> None:
    """Training is done and the roles are leaving."""
    run.saw("launcher", "role.exited", role="client:0")


def _interrupted(run: Launched, moment: Moment, within_s: float, codes: tuple[int, ...] = (130,)) -> None:
    moment(run)
    run.interrupt()
    assert run.ends(within_s) in codes, run.output
    run.leaves_nothing()
    assert "Traceback" not in run.output
    assert run.log_dir is None or not list(run.log_dir.glob("*.out")), "a role has printed something"


@pytest.mark.slow
@pytest.mark.parametrize("moment", [preloading, starting, joining])
def test_ctrl_c_ends_a_run_that_starts(moment: Moment, tmp_path: Path, gone_within_s: float) -> None:
    with launched(tmp_path, *FEW, cold=True) as run:
        _interrupted(run, moment, gone_within_s)
        assert "stopping; press Ctrl-C again" in run.output


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_and_the_next_one_starts_at_once(
    tmp_path: Path, gone_within_s: float
) -> None:
    with launched(tmp_path / "first", *ENDLESS) as first:
        training(first)
        # All kinds of processes are there: the launcher, the fork server, roles and the DHT daemon.
        assert len(first.processes()) >= 2 + 8 + 1
        first.kill()
        with launched(tmp_path / "second", *ENDLESS, runtime_dir=first.runtime_dir) as second:
            first.ends(gone_within_s)
            until(lambda: not first.processes(), gone_within_s, "the first run's processes are gone")
            _interrupted(second, training, gone_within_s)
            summary = second.summary()
            assert summary["exit"] == "interrupted"
            assert summary["outer_rounds"] >= 1
            assert (summary["duplicates"], summary["missing"]) == (0, 0)
            first.leaves_nothing()


def test_ctrl_c_while_the_configuration_is_read_is_silent(tmp_path: Path, gone_within_s: float) -> None:
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    # As long as it is open for writing, reading it does not end.
    writer = os.open(path, os.O_RDWR)
    try:
        with launched(tmp_path, *FEW, f"--config-path={path}", cold=True) as run:
            opened = Path(f"/proc/{run.process.pid}/fd")
            until(lambda: path in [_target(fd) for fd in opened.iterdir()], START_S, "the configuration is being read")
            _interrupted(run, reading, gone_within_s)
            assert run.output == ""
    finally:
        os.close(writer)


def _target(link: Path) -> Path | None:
    """Return where a link leads; None if it is gone."""
    try:
        return link.readlink()
    except FileNotFoundError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("moment", [reading, preloading, starting])
def test_a_kill_at_the_start_leaves_nothing(moment: Moment, tmp_path: Path, gone_within_s: float) -> None:
    with launched(tmp_path, *FEW, cold=True) as run:
        moment(run)
        run.kill()
        run.ends(gone_within_s)
        run.leaves_nothing(gone_within_s)


@pytest.mark.slow
def test_ctrl_c_at_the_end_changes_nothing_that_was_reached(tmp_path: Path, gone_within_s: float) -> None:
    with launched(tmp_path, *SMALL, "--servers.replicas=1") as run:
        _interrupted(run, ending, gone_within_s, codes=(0,))
        assert run.summary()["exit"] == "done"


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_role_that_hangs(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        training(run)
        frozen = run.pid_of("trainer:0")
        os.kill(frozen, signal.SIGSTOP)
        run.interrupt()
        until(lambda: "stopping" in run.output, START_S, "the first Ctrl-C is confirmed")
        run.interrupt()
        assert run.ends(END_S) == 130, run.output
        [killing, *_] = run.events("launcher", "supervisor.killing")
        assert (killing["grace_s"], "trainer:0" in killing["roles"]) == (0.0, True)
        run.leaves_nothing()


@pytest.mark.slow
def test_one_ctrl_c_ends_a_run_with_a_role_that_hangs(tmp_path: Path, gone_within_s: float) -> None:
    with launched(tmp_path, *FEW) as run:
        training(run)
        os.kill(run.pid_of("server:1"), signal.SIGSTOP)
        _interrupted(run, lambda _: None, gone_within_s)
        [killing] = run.events("launcher", "supervisor.killing")
        assert "server:1" in killing["roles"]
        assert killing["grace_s"] <= GRACE_S
        assert (run.require_log_dir() / "curves.svg").is_file(), "as far as it has got"


@pytest.mark.slow
def test_sigterm_to_the_launcher_ends_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        joining(run)
        # Of hivemind the DHT alone was imported: its own averaging would have brought scipy.
        assert "/scipy/" not in Path(f"/proc/{run.fork_server()}/maps").read_text()
        run.processes()
        run.process.terminate()
        assert run.ends(END_S) == 130
        run.leaves_nothing()
