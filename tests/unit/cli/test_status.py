"""Where `shoal status` looks for a swarm."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.known_peers import with_known_peers
from shoal.cli.run_files import make_log_dir
from shoal.cli.run_folder import LOCAL_MARK
from shoal.cli.status import finder_of, print_status, watch_status
from shoal.cli.watching import FinderHere
from shoal.config import Config, load_config
from shoal.config.dump import dump_config
from shoal.errors import BootstrapError, ConfigError, RemoteError
from shoal.ids import RunId
from shoal.runtime.run_dir import RunNote

HERE = "/ip4/127.0.0.1/tcp/50000/p2p/C"
ONE, TWO = "/ip4/10.0.0.1/tcp/50000/p2p/A", "/ip4/10.0.0.2/tcp/50000/p2p/B"


def _left(log_dir: Path, run: str, peer: str, age_s: int) -> None:
    folder = log_dir / run
    folder.mkdir()
    (folder / "initial_peers.txt").write_text(f"{peer}\n")
    values = {"experiment_prefix": run, "network": {"swarm_key_file": f"/keys/{run}"}}
    (folder / "config.yaml").write_text(dump_config(load_config(None, values, {})))
    os.utime(folder / "initial_peers.txt", (1e9 - age_s, 1e9 - age_s))


def _config(log_dir: Path, **network: object) -> Config:
    return load_config(None, {"log_dir": str(log_dir), "network": network}, {})


def test_peers_that_are_given_come_first(tmp_path: Path) -> None:
    _left(tmp_path, "old", ONE, 0)
    config = _config(tmp_path, initial_peers=[TWO])
    assert with_known_peers(config, {}) is config


def test_else_it_is_the_newest_run_of_this_host_with_its_prefix_and_key(tmp_path: Path) -> None:
    _left(tmp_path, "old", ONE, 100)
    _left(tmp_path, "new", TWO, 10)
    found = with_known_peers(_config(tmp_path), {})
    assert found.network.initial_peers == (TWO,)
    assert (found.experiment_prefix, str(found.network.swarm_key_file)) == ("new", "/keys/new")
    given = {"experiment_prefix": "--experiment-prefix", "network.swarm_key_file": "--swarm-key-file"}
    found = with_known_peers(_config(tmp_path), given)
    assert found.network.initial_peers == (TWO,)
    assert (found.experiment_prefix, found.network.swarm_key_file) == ("shoal", Config().network.swarm_key_file)


def test_a_run_that_only_its_own_terminal_sees_hides_no_other(tmp_path: Path) -> None:
    _left(tmp_path, "local", HERE, 0)
    (tmp_path / "local" / LOCAL_MARK).touch()
    with pytest.raises(ConfigError, match="one of run-local is seen on its own host only"):
        with_known_peers(_config(tmp_path), {})
    _left(tmp_path, "old", ONE, 100)
    assert with_known_peers(_config(tmp_path), {}).network.initial_peers == (ONE,)


def test_a_swarm_of_one_machine_that_others_have_the_key_of_is_found_at_its_loopback_address(tmp_path: Path) -> None:
    _left(tmp_path, "shared", HERE, 0)
    assert with_known_peers(_config(tmp_path), {}).network.initial_peers == (HERE,)


def test_only_the_folder_of_a_run_of_one_machine_alone_is_marked(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert (make_log_dir(config, RunId("alone"), is_local=True) / LOCAL_MARK).exists()
    assert not (make_log_dir(config, RunId("shared")) / LOCAL_MARK).exists()


def test_without_either_the_user_is_told_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --initial-peers"):
        with_known_peers(_config(tmp_path), {})


def test_of_a_run_that_has_ended_here_it_is_said_how_when_and_why_and_what_to_do_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refused(finder: object) -> None:
        raise BootstrapError("nothing listens there")

    monkeypatch.setattr("shoal.cli.status.living_runs", list)
    monkeypatch.setattr("shoal.cli.listing_runs.living_runs", list)
    monkeypatch.setattr("shoal.cli.status.look_once", refused)
    monkeypatch.setattr("shoal.cli.status.load_swarm_key", lambda path: b"k" * 32)
    _left(tmp_path, "over", ONE, 0)
    with pytest.raises(BootstrapError, match="nothing listens there"):
        print_status(_config(tmp_path), {}, as_json=False)
    failure = {"kind": "NoPipeline", "text": "stage 1 had no server", "remedy": []}
    summary = {"exit": "failed", "samples": 8, "ended": "2026-01-02T03:04:05.000+00:00", "failure": failure}
    (tmp_path / "over" / "summary.json").write_text(json.dumps(summary))
    how = (
        r"(?s)these have ended.*over  failed.*over, 2026-01-02 03:04 UTC: the run has failed: stage 1 had no server\n"
        r"next: shoal logs \S+/over --level warning\n +shoal events \S+/over"
    )
    # It was asked how the runs are, and that is the answer; a program gets the status of a run, or none.
    assert print_status(_config(tmp_path), {}, as_json=False) == 0
    assert re.search(how, capsys.readouterr().out)
    with pytest.raises(ConfigError, match=how):
        print_status(_config(tmp_path), {}, as_json=True)
    with pytest.raises(BootstrapError, match="nothing listens there"):
        print_status(_config(tmp_path, initial_peers=[TWO]), {}, as_json=False)
    for wanted in ("ov", str(tmp_path / "over")):
        assert print_status(_config(tmp_path), {}, wanted, as_json=False) == 0
        assert re.search(rf"(?s)run {wanted} has ended.*over  failed", capsys.readouterr().out)
        assert watch_status(_config(tmp_path), {}, wanted, interval_s=1.0, as_json=False) == 0
        assert re.search(rf"(?s)run {wanted} has ended.*over  failed", capsys.readouterr().out)
        with pytest.raises(ConfigError, match=rf"(?s)run {wanted} has ended.*over  failed"):
            finder_of(_config(tmp_path), {}, wanted)
    with pytest.raises(ConfigError, match="no run else of yours lives on this host"):
        print_status(_config(tmp_path), {}, "else", as_json=False)


def test_a_run_of_one_machine_that_was_killed_is_gone_on_with_by_the_command_that_began_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.cli.status.living_runs", list)
    monkeypatch.setattr("shoal.cli.listing_runs.living_runs", list)
    config = _config(tmp_path)
    for name in ("gpt-20260101-000000-aaaa", "gpt-20260102-000000-bbbb"):
        make_log_dir(config, RunId(name), is_local=True)
    (tmp_path / "checkpoints/gpt-20260102-000000-bbbb/round_000003").mkdir(parents=True)
    assert print_status(config, {}, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["gpt-20260101-000000-aaaa", "broken", "off"],
        ["gpt-20260102-000000-bbbb", "broken", "off"],
    ]
    assert (
        f"next: shoal run-local --resume {tmp_path}/checkpoints/gpt-20260102-000000-bbbb --log-dir {tmp_path}" in lines
    )


def _living(name: str, **changed: object) -> RunNote:
    return RunNote(run_id=name, hosts="client", launcher_pid=1, begun_unix_s=0.0, log_dir="/logs", **changed)


def test_a_run_is_named_or_it_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = [_living("older-1", client="A", socket="/a"), _living("newer-2", client="B", socket="/b")]
    monkeypatch.setattr("shoal.cli.status.living_runs", lambda: notes)
    config = _config(tmp_path)
    assert finder_of(config, {}) == FinderHere(notes[1])
    assert finder_of(config, {}, "older") == FinderHere(notes[0])
    with pytest.raises(ConfigError, match=r"no run else of yours lives on this host \(but older-1, newer-2\)"):
        finder_of(config, {}, "else")
    with pytest.raises(ConfigError, match="older and initial peers: a swarm has one run"):
        finder_of(_config(tmp_path, initial_peers=[TWO]), {}, "older")


def test_a_run_whose_client_does_not_listen_yet_is_said_to_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = _living("new-1", client="A", socket=str(tmp_path / "client.sock"))
    monkeypatch.setattr("shoal.cli.status.living_runs", lambda: [note])
    monkeypatch.setattr("shoal.cli.watching.living_runs", lambda: [note])
    with pytest.raises(RemoteError, match="does not answer: it is being started; ask again in some seconds"):
        print_status(_config(tmp_path), {}, as_json=False)


def test_a_flag_is_told_from_a_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    monkeypatch.setattr("shoal.cli.status.print_status", lambda config, origins, run, as_json: asked.append(run) or 0)
    assert main(["status", "--log-dir=here"]) == 0
    assert main(["status", "mine", "--log-dir=here"]) == 0
    assert asked == ["", "mine"]


def test_a_word_too_many_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "new", "my.key"]) == 2
    assert "unexpected argument 'my.key'; values follow a flag" in capsys.readouterr().err
