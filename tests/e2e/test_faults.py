"""Processes of a run are killed in the middle of it: it goes on without them, or ends and says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.launched import SMALL, Launched, launched

from shoal.averaging.audit import audit

pytestmark = pytest.mark.timeout(180)

# Long enough that a fault in round 2 has rounds before and after it.
_RUN = (*SMALL, "--diloco.inner-steps=8", "--diloco.outer-steps=5")


def _kill_in_round_2(run: Launched, role: str) -> None:
    run.saw("client_0", "round.recorded", round=1)
    run.processes()
    os.kill(run.pid_of(role), signal.SIGKILL)


def _ended_well(run: Launched) -> dict:
    assert run.ends(90.0) == 0, run.output
    run.leaves_nothing()
    assert run.log_dir is not None
    summary = run.summary()
    (opened,) = run.events("data_server_0", "dataset.opened")
    found = audit(run.log_dir, opened["num_train"])
    assert (found.duplicates, found.missing) == (0, 0)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert (summary["outer_rounds"], summary["exit"]) == (5, "done")
    return summary


def test_a_run_goes_on_over_the_other_replica_when_a_server_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "server:1")
        summary = _ended_well(run)
    (failover,) = summary["failovers"]
    assert failover["kind"] == "server"
    assert 0 < failover["at_s"] < summary["seconds_total"]
    assert 0 <= failover["recovered_after_s"] < 10
    assert "server 1 has ended (killed by SIGKILL); the swarm goes on without it" in run.output


@pytest.mark.slow
def test_the_slot_of_a_killed_trainer_goes_on(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "trainer:1")
        summary = _ended_well(run)
        restarted = [event for event in run.events("launcher", "role.started") if event["role"] == "trainer:1"]
        assert len(restarted) == 2
    assert [failover["kind"] for failover in summary["failovers"]] == ["trainer"]
    assert "trainer 1 has ended" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("role", ["data_server:0", "client:0"])
def test_a_run_without_its_data_server_or_client_fails_and_says_so(role: str, tmp_path: Path) -> None:
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
def test_a_killed_monitor_does_not_end_the_run(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "monitor:0")
        summary = _ended_well(run)
    assert summary["failovers"] == []
    assert "monitor 0 has ended" in run.output
