"""Which run of this host a command means, and what `shoal ps` and `shoal clean` say and do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Literal

import pytest

from shoal.cli import listing_living, runs_here
from shoal.errors import ConfigError
from shoal.ids import PeerId
from shoal.runtime.fork_messages import TAG_NAME
from shoal.runtime.run_dir import RunDir, RunNote, found_dirs


def note(
    run_id: str,
    hosts: Literal["client", "servers", "mirror"] = "servers",
    begun_unix_s: float = 1.0,
    log_dir: str = "",
) -> RunNote:
    return RunNote(
        run_id=run_id,
        hosts=hosts,
        launcher_pid=42,
        begun_unix_s=begun_unix_s,
        log_dir=log_dir or f"/logs/{run_id}",
        client=PeerId("client"),
        socket="/nowhere/client_0",
    )


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All runs of this user that the commands see."""
    monkeypatch.setattr(runs_here, "found_dirs", lambda: found_dirs(tmp_path))
    return tmp_path


def left_by_a_dead_run(parent: Path) -> Path:
    """Leave what a run leaves whose processes all ended at once."""
    with RunDir(parent) as living:
        path = living.path.parent / "0badcafe"
        path.mkdir()
        (path / "server_0").write_bytes(bytes(10))
    return path


def test_the_only_run_needs_no_name_and_of_several_one_has_to_be_said() -> None:
    one, other = note("gpt-1"), note("gpt-2")
    assert runs_here.choose("", [one]) is one
    assert runs_here.choose("gpt-2", [one, other]) is other
    assert runs_here.choose("res", [one, other]) is None
    assert runs_here.choose("", []) is None
    for wanted in ("", "gpt"):
        with pytest.raises(ConfigError, match="say which run, there are gpt-1, gpt-2"):
            runs_here.choose(wanted, [one, other])


def test_a_run_may_be_named_by_its_folder_or_by_a_link_to_it(tmp_path: Path) -> None:
    one, other = (note(f"sandbox-{number}", log_dir=str(tmp_path / f"sandbox-{number}")) for number in (1, 2))
    Path(other.log_dir).mkdir()
    (tmp_path / "sandbox").symlink_to("sandbox-2")
    for wanted in (tmp_path / "sandbox", tmp_path / "sandbox-2"):
        assert runs_here.choose(str(wanted), [one, other]) is other
    assert runs_here.choose(str(tmp_path), [one, other]) is None
    assert "(but sandbox-1)" in runs_here.nothing_here("gpt", [one, one])


def test_a_name_that_another_one_begins_with_means_itself() -> None:
    short, long = note("gpt"), note("gpt-2")
    assert runs_here.choose("gpt", [short, long]) is short


def test_of_a_run_with_client_and_servers_here_the_client_is_told() -> None:
    client, servers = note("gpt", "client"), note("gpt")
    for runs in ([client, servers], [servers, client]):
        assert runs_here.choose("", runs) is client


def test_ps_lists_what_lives_and_names_what_is_left_with_the_command_that_removes_it(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listing_living.list_runs(as_json=False) == 0
    assert capsys.readouterr().out == "no run of yours lives on this host\n"
    dead = left_by_a_dead_run(parent)
    with RunDir(parent) as living:
        dead.mkdir()
        living.announce(note("gpt-1", begun_unix_s=0.0))
        assert listing_living.list_runs(as_json=False) == 0
        titles, run, left, hint = capsys.readouterr().out.splitlines()
        assert titles.split() == ["run", "round", "here", "since", "(UTC)", "launcher", "logs", "state"]
        assert run.split() == ["gpt-1", "-", "servers", "1970-01-01", "00:00", "42", "/logs/gpt-1", "serving"]
        assert left.startswith(f"left of a dead run: {dead}: 0 files")
        assert hint == "`shoal clean` removes it"
        assert listing_living.list_runs(as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert ([each["run"] for each in told["runs"]], told["left"]) == (["gpt-1"], [str(dead)])


def test_ps_says_which_run_a_host_mirrors(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir(parent) as living:
        living.announce(note("gpt-1", "mirror"))
        listing_living.list_runs(as_json=True)
        [row] = json.loads(capsys.readouterr().out)["runs"]
        assert (row["run"], row["hosts"], row["state"]) == ("gpt-1", "mirror", "mirroring")


def test_a_run_whose_client_does_not_listen_yet_starts(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDir(parent) as living:
        living.announce(note("gpt-1", "client"))
        listing_living.list_runs(as_json=False)
    assert capsys.readouterr().out.splitlines()[1].endswith("starting")


def test_clean_lists_first_removes_what_it_was_told_to_and_never_what_lives(
    parent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listing_living.clean(yes=True) == 0
    assert capsys.readouterr().out == "nothing is left of dead runs\n"
    with RunDir(parent) as living:
        dead = left_by_a_dead_run(parent)
        monkeypatch.setattr(sys, "stdin", StringIO())
        assert listing_living.clean(yes=False) == 0
        out = capsys.readouterr().out
        assert out == f"{dead}: 1 files, 0 of them sockets, 10 bytes\nnothing is removed: say --yes\n"
        assert dead.exists()
        assert listing_living.clean(yes=True) == 0
        assert capsys.readouterr().out.endswith("removed 1 of 1\n")
        assert not dead.exists()
        assert living.path.is_dir()


def test_clean_ends_processes_that_were_started_for_a_dead_run_and_no_others(
    parent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir(parent) as living:
        dead = left_by_a_dead_run(parent)
        sleeping = [
            subprocess.Popen(["sleep", "600"], env={**os.environ, TAG_NAME: path.name}) for path in (dead, living.path)
        ]
        try:
            assert listing_living.clean(yes=True) == 0
            assert f"processes {sleeping[0].pid}" in capsys.readouterr().out
            assert sleeping[0].wait(60) == -9
            assert sleeping[1].poll() is None
        finally:
            for process in sleeping:
                process.kill()
                process.wait()


# Numbers, models of the configuration and the network take twice as long to load as a client takes to answer.
ORDER = """
import sys, anyio
import shoal.cli.app
from shoal.cli.asking import ask_here
from shoal.cli.steering import Steer, Steered
from shoal.clock import SystemClock
from shoal.identity import Identity
from shoal.runtime.run_dir import RunNote

note = RunNote(run_id="a-run", hosts="client", launcher_pid=1, begun_unix_s=0.0, log_dir="",
               client=Identity.generate().peer_id, socket="/nowhere/socket")
print(anyio.run(ask_here, note, Steer(1, "pause", "somebody"), Steered, 0.1, SystemClock()))
heavy = {"torch", "hivemind", "pydantic", "numpy", "yaml", "shoal.config"} & set(sys.modules)
assert not heavy, heavy
"""


def test_an_order_on_the_client_s_own_host_loads_nothing_that_it_does_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "/nowhere/socket" in done.stdout
