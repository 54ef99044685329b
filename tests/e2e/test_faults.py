"""Processes of a run are killed in the middle of it: it goes on without them, or ends and says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.launched import SMALL, Launched, launched, until

from shoal.averaging.audit import audit
from shoal.averaging.journal import read_records

pytestmark = pytest.mark.timeout(180)

# Long enough that a fault in round 2 has rounds before and after it.
_RUN = (*SMALL, "--diloco.inner-steps=8", "--diloco.outer-steps=5")


def _kill_in_round_2(run: Launched, role: str) -> None:
    run.saw("client_0", "round.recorded", round=1)
    run.processes()
    os.kill(run.pid_of(role), signal.SIGKILL)


def _ended_well(run: Launched, num_rounds: int = 5) -> dict:
    assert run.ends(90.0) == 0, run.output
    run.leaves_nothing()
    assert run.log_dir is not None
    summary = run.summary()
    opened = run.events("data_server_0", "dataset.opened")[0]
    found = audit(run.log_dir, opened["num_train"])
    assert (found.duplicates, found.missing) == (0, 0)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert (summary["outer_rounds"], summary["exit"]) == (num_rounds, "done")
    return summary


def test_a_run_goes_on_over_the_other_replica_while_a_killed_server_is_started_again(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=20") as run:
        _kill_in_round_2(run, "server:1")
        summary = _ended_well(run, num_rounds=20)
        started = [event for event in run.events("launcher", "role.started") if event["role"] == "server:1"]
        fetched = run.events("server_1", "state.fetched")
        last = run.events("server_1", "round.swapped")[-1]
        both = [len(read_members(run, round)) for round in (2, 20)]
    (failover,) = summary["failovers"]
    assert failover["kind"] == "server"
    assert 0 < failover["at_s"] < summary["seconds_total"]
    assert 0 <= failover["recovered_after_s"] < 10
    assert "server 1 has ended (killed by SIGKILL); it is started again" in run.output
    # It is back with the state of its stage from the others, ends with the same bytes, and has trained.
    assert len(started) == 2
    assert fetched
    assert (last["round"], last["parameters"] in summary["hashes"].values()) == (20, True)
    assert both == [3, 4]


def read_members(run: Launched, round: int) -> list[str]:
    """The peers whose weight counts in a record."""
    assert run.log_dir is not None
    (record,) = [record for record, _ in read_records(run.log_dir) if record.round == round]
    weights = [pair for stage in record.stages for pair in zip(stage.members, stage.weights, strict=True)]
    return [peer for peer, weight in weights if weight > 0]


def test_the_slot_of_a_killed_trainer_goes_on_in_its_round(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "trainer:1")
        summary = _ended_well(run)
        restarted = [event for event in run.events("launcher", "role.started") if event["role"] == "trainer:1"]
        assert len(restarted) == 2
    (failover,) = summary["failovers"]
    assert failover["kind"] == "trainer"
    assert failover["recovered_after_s"] < 3
    # Two slots, five rounds of eight steps: none is left out.
    assert summary["steps"] >= 79
    assert "trainer 1 has ended" in run.output


def test_a_killed_data_server_is_started_again_and_the_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    with launched(tmp_path / "undisturbed", *_RUN) as run:
        undisturbed = _ended_well(run)
    with launched(tmp_path / "disturbed", *_RUN) as run:
        _kill_in_round_2(run, "data_server:0")
        summary = _ended_well(run)
    (failover,) = summary["failovers"]
    assert failover["kind"] == "data_server"
    assert failover["recovered_after_s"] < 3
    assert (summary["hashes"], summary["steps"]) == (undisturbed["hashes"], undisturbed["steps"])
    assert "data_server 0 has ended (killed by SIGKILL); it is started again" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("role", ["client:0"])
def test_a_run_without_its_client_fails_and_says_so(role: str, tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=1000") as run:
        _kill_in_round_2(run, role)
        assert run.ends(15.0) == 1, run.output
        run.leaves_nothing()
        name = role.replace(":", " ")
        assert f"failed: {name} ended early: killed by SIGKILL" in run.output
        if role == "data_server:0":
            assert run.summary()["exit"] == "failed"
        assert f"the logs of all roles are in {run.log_dir}" in run.output
        assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_stage_that_loses_both_replicas_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=1000", "--diloco.averaging-timeout=5") as run:
        run.saw("client_0", "round.recorded", round=1)
        ready = {index: run.events(f"server_{index}", "server.ready")[0]["stage"] for index in range(4)}
        run.processes()
        for index in (index for index, stage in ready.items() if stage == 1):
            os.kill(run.pid_of(f"server:{index}"), signal.SIGKILL)
        assert run.ends(60.0) == 1, run.output
        run.leaves_nothing()
        assert "no replica serves stage 1 any more" in run.output
        assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_killed_monitor_is_started_again_and_nobody_else_notices(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=40") as run:
        _kill_in_round_2(run, "monitor:0")
        peers = run.log_dir / "initial_peers.txt"
        written_s = peers.stat().st_mtime
        until(lambda: peers.stat().st_mtime > written_s, 10.0, "new addresses")
        # Whoever starts after it finds the swarm through it, and it has found the swarm.
        run.saw("client_0", "round.recorded", round=6)
        os.kill(run.pid_of("server:1"), signal.SIGKILL)
        run.saw("server_1", "state.fetched")
        summary = _ended_well(run, num_rounds=40)
    assert [failover["kind"] for failover in summary["failovers"]] == ["server"]
    assert "monitor 0 has ended (killed by SIGKILL); it is started again" in run.output
