"""`shoal ps`, `pause`, `resume-run`, `stop`, `clean` on real runs: on the client's host without a key, else with it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, FEW, START_S, Launched, launched, until

from shoal.cli import main

pytestmark = pytest.mark.timeout(600)


def shoal(run: Launched, *words: str, code: int = 0) -> str:
    """Run a command beside a run, as the same user and in this process; return what it prints."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        open(os.devnull) as nothing,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        patch.setenv("XDG_RUNTIME_DIR", str(run.runtime_dir))
        patch.setattr(sys, "stdin", nothing)
        ended = main(words)
    assert ended == code, said.getvalue()
    return said.getvalue()


def elsewhere(hosts: Hosts, host: str, word: str, *flags: str, code: int = 0, start: str = "steering") -> str:
    """Run a command on a host of a swarm; return what it prints."""
    asked = hosts.run(host, "-m", "shoal", word, *flags, start=start)
    ended = asked.ends(START_S)
    assert ended == code, f"{word} on {host}: exit code {ended}: {asked.output}"
    return asked.output


def listed(run: Launched) -> dict[str, Any]:
    """Return what `shoal ps` says of a run whose client answers; others may live on this host."""
    name = run.require_log_dir().name

    def answered() -> dict[str, Any] | None:
        [row] = (row for row in json.loads(shoal(run, "ps", "--json"))["runs"] if row["run"] == name)
        return None if row["round"] is None else row  # on a busy machine an answer may be late

    return until(answered, END_S, "an answer of the client")


def test_a_run_of_this_host_is_paused_and_resumed_also_if_its_client_dies_writes_a_checkpoint_when_asked_and_stops(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *FEW, "--param-mirror.every-rounds=0", "--param-mirror.every-s=1e6") as run:
        run.saw("client_0", "round.recorded")
        log_dir = run.require_log_dir()
        name = log_dir.name
        row = listed(run)
        assert (row["run"], row["hosts"], row["launcher_pid"]) == (name, "client", run.process.pid)
        assert row["log_dir"] == str(log_dir)
        assert row["round"] >= 1
        assert f"run {name} is not paused" in shoal(run, "resume-run", name)
        assert shoal(run, "pause", name).startswith(f"run {name} is paused in round ")
        before = listed(run)
        assert before["paused"]
        assert before["state"].startswith("paused by ")
        os.kill(run.living_pid_of("client:0"), signal.SIGKILL)
        run.saw("client_0", "client.resumed")
        assert f"run {name} is paused already" in shoal(run, "pause", name)
        after = listed(run)
        assert (after["paused"], after["round"]) == (True, before["round"])
        recorded = len(run.events("client_0", "round.recorded"))
        assert f"run {name} goes on in round {before['round']}" in shoal(run, "resume-run", name)
        until(lambda: len(run.events("client_0", "round.recorded")) > recorded, END_S, "the next record")
        assert "paused by " in run.output
        assert "resumed by " in run.output
        assert [each["by"] for each in run.events("client_0", "run.resumed")]

        # The first one is due; no other is for a million seconds.
        run.saw("mirror_0", "checkpoint.written")
        assert "a checkpoint of the next record is wanted" in shoal(run, "checkpoint", name)
        until(lambda: run.events("mirror_0", "checkpoint.written")[1:], END_S, "the checkpoint")
        until(lambda: "a checkpoint of the next record is wanted by " in run.output, END_S, "its line on the screen")
        assert "no run nobody of yours" in shoal(run, "stop", "nobody", code=2)
        assert shoal(run, "stop", name).startswith(f"run {name} stops in round ")
        # With its model, its checkpoint and its summary.
        assert run.ends(END_S) == 0, run.output
        run.leaves_nothing()
        assert "stopped by " in run.output
        assert [each["by"] for each in run.events("client_0", "run.stopped")]
        assert run.summary()["exit"] == "interrupted"
        assert (run.summary()["duplicates"], run.summary()["missing"]) == (0, 0)
        assert (log_dir / "model").is_dir()
        checkpoint = max((run.log_root / "checkpoints" / log_dir.name).glob("round_*"))
        assert int(checkpoint.name.removeprefix("round_")) == run.summary()["outer_rounds"]
        inner = sorted(path.name for path in checkpoint.glob("inner_*"))
        assert inner == ["inner_00_00.safetensors", "inner_01_00.safetensors"], "it goes on as if it was not stopped"
        assert not run.events("client_0", "checkpoint.last_lacks")
        assert f"no run {name} of yours" in shoal(run, "stop", name, code=2)


@pytest.mark.slow
def test_another_host_steers_with_the_key_only_and_all_hosts_leave_well(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS, "--num-servers=2")
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        servers = hosts.run("servers", *command, environment=variable)
        client.saw("client_0", "round.recorded")
        peers = f"--initial-peers={variable['INITIAL_PEERS']}"
        for word in ("stop", "pause"):
            assert "swarm key" in elsewhere(hosts, "stranger", word, peers, code=2, start=f"{word}-keyless")
        wrong = tmp_path / "wrong.key"
        wrong.write_bytes(bytes(32))
        wrong.chmod(0o600)
        said = elsewhere(hosts, "stranger", "stop", peers, f"--swarm-key-file={wrong}", code=2, start="wrong")
        assert "has another swarm key than this host" in said
        hosts.give_key("client", "other")
        said = elsewhere(hosts, "other", "stop", "nobody", peers, code=2)
        assert f"no run nobody there: the swarm has run {client.require_log_dir().name}" in said
        assert " is paused in round " in elsewhere(hosts, "other", "pause", peers, start="pausing")
        said = elsewhere(hosts, "other", "status", peers, "--json", start="looking")
        assert json.loads(said.splitlines()[-1])["paused"]
        assert " goes on in round " in elsewhere(hosts, "other", "resume-run", peers, start="resuming")
        assert " stops in round " in elsewhere(hosts, "other", "stop", peers, start="again")
        assert client.ends(END_S) == 0, client.output
        assert servers.ends(END_S) == 0, servers.output
        assert client.summary()["exit"] == "interrupted"
        for each in (client, servers):
            each.leaves_nothing()
