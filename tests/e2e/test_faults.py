"""Processes of a run are killed in the middle of it: it goes on without them, or ends and says why."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Container
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, PACE, SMALL, START_S, Launched, launched, until

from shoal.averaging.audit import audit
from shoal.averaging.journal import read_records
from shoal.monitor.exporters.metrics_file import read_rows
from shoal_lab.verdict import replayed

pytestmark = pytest.mark.timeout(600)

# Long enough that a fault in round 2 has rounds before and after it.
_ROUNDS = 5
_RUN = (*SMALL, "--host-name=box1", "--diloco.inner-steps=8", f"--diloco.outer-steps={_ROUNDS}")
# For as long as a test needs it; nobody waits for its last round.
_LONG_RUN = (*_RUN, "--diloco.outer-steps=10000", f"--emulation.call-s={PACE}")


def _kill_in_round_2(run: Launched, role: str) -> None:
    run.saw("client_0", "round.recorded", round=1)
    run.processes()
    os.kill(run.pid_of(role), signal.SIGKILL)


def ended_well(run: Launched, num_rounds: int = _ROUNDS) -> dict:
    """Wait for the good end of a run with so many rounds and return its summary; nothing is lost, doubled or left."""
    assert run.ends(150.0) == 0, run.output
    summary = summed_up(run)
    assert (summary["outer_rounds"], summary["exit"]) == (num_rounds, "done")
    return summary


def interrupted(run: Launched) -> dict:
    """Interrupt a run that goes on, and return its summary; nothing is lost, doubled or left."""
    run.interrupt()
    assert run.ends(END_S) == 130, run.output
    return summed_up(run)


def summed_up(run: Launched) -> dict:
    """Return the summary of a run that has ended; nothing is lost, doubled or left."""
    run.leaves_nothing()
    assert run.log_dir is not None
    summary = run.summary()
    opened = run.events("data_server_0", "dataset.opened")[0]
    found = audit(run.log_dir, opened["num_train"])
    assert (found.duplicates, found.missing) == (0, 0)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    return summary


def test_a_run_goes_on_over_the_other_replica_while_a_killed_server_is_started_again(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=10000") as run:
        _kill_in_round_2(run, "server:1")
        again = until(lambda: _started_again(run, "server:1"), START_S, "the server's next process")
        os.kill(again, signal.SIGSTOP)  # until there is a round without it, however fast it would be back
        try:
            until(lambda: _round_of(range(4), run, 2), START_S, "a round without it")
        finally:
            os.kill(again, signal.SIGCONT)
        run.saw("server_1", "state.fetched")
        reached = run.events("client_0", "round.recorded")[-1]["round"]
        back = until(lambda: _round_of([4], run, reached + 1), START_S, "a round with all servers")
        recorded = run.saw("client_0", "round.recorded", round=back)
        swapped = run.saw("server_1", "round.swapped", round=back)
        summary = interrupted(run)
        started = [event for event in run.events("launcher", "role.started") if event["role"] == "server:1"]
        members = [len(read_members(run, round)) for round in range(1, back + 1)]
    assert run.log_dir is not None
    replay, problems = replayed(run.log_dir)
    assert not problems
    assert int(replay.split()[0]) >= back
    (failover,) = summary["failovers"]
    assert failover["kind"] == "server"
    assert 0 < failover["at_s"] < summary["seconds_total"]
    assert failover["recovered_after_s"] >= 0
    assert "server 1@box1 has ended (killed by SIGKILL); it is started again" in run.output
    # It is back with the state of its stage from the others, has the same bytes, and has trained.
    assert len(started) == 2
    assert swapped["parameters"] in recorded["hashes"].values()
    # Without it the other replica of its path may have had nothing to do either.
    assert min(members) < members[-1] == 4


def _started_again(run: Launched, role: str) -> int | None:
    """Return the second process of a role; None if there is none yet."""
    started = [event["pid"] for event in run.events("launcher", "role.started") if event["role"] == role]
    return started[1] if len(started) > 1 else None


def _round_of(num_members: Container[int], run: Launched, first: int) -> int | None:
    """Return a round, from `first` on, in whose record so many peers have weight; None if there is none yet."""
    recorded = [event["round"] for event in run.events("client_0", "round.recorded") if event["round"] >= first]
    return next((round for round in recorded if len(read_members(run, round)) in num_members), None)


def read_members(run: Launched, round: int) -> list[str]:
    """The peers whose weight counts in a record."""
    assert run.log_dir is not None
    (record,) = [record for record, _ in read_records(run.log_dir) if record.round == round]
    weights = [pair for stage in record.stages for pair in zip(stage.members, stage.weights, strict=True)]
    return [peer for peer, weight in weights if weight > 0]


@pytest.mark.slow
def test_the_slot_of_a_killed_trainer_goes_on_in_its_round(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "trainer:1")
        summary = ended_well(run)
        restarted = [event for event in run.events("launcher", "role.started") if event["role"] == "trainer:1"]
        assert len(restarted) == 2
    (failover,) = summary["failovers"]
    assert failover["kind"] == "trainer"
    # Two slots, eight steps a round: none is left out.
    assert summary["steps"] >= 2 * 8 * _ROUNDS - 1
    assert re.search(r"trainer 1@\S+ has ended \(killed by SIGKILL\); its client replaces it", run.output)
    assert "the swarm goes on without it" not in run.output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The summary of a run in which nobody dies."""
    with launched(tmp_path_factory.mktemp("undisturbed"), *_RUN) as run:
        return ended_well(run)


@pytest.mark.slow
def test_a_killed_data_server_is_started_again_and_the_run_ends_with_the_same_bytes(
    tmp_path: Path, undisturbed: dict
) -> None:
    with launched(tmp_path, *_RUN) as run:
        _kill_in_round_2(run, "data_server:0")
        summary = ended_well(run)
    (failover,) = summary["failovers"]
    assert failover["kind"] == "data_server"
    assert (summary["hashes"], summary["steps"]) == (undisturbed["hashes"], undisturbed["steps"])
    assert "data server@box1 has ended (killed by SIGKILL); it is started again" in run.output


_COUNTED = ("samples", "steps", "outer_rounds", "eval_losses", "hashes", "steps_lost")


def _is_as_undisturbed(summary: dict, undisturbed: dict) -> None:
    for name in _COUNTED:
        assert summary[name] == undisturbed[name], name
    for traffic in ("activations", "gradients"):
        assert summary["bytes_sent"][traffic] == undisturbed["bytes_sent"][traffic], traffic
    assert 0 < summary["seconds_to_first_step"] < summary["seconds_total"]
    assert summary["samples_per_s"] > 0


@pytest.mark.slow
def test_a_client_that_is_killed_at_any_moment_is_started_again_and_the_run_ends_with_the_same_bytes_and_totals(
    tmp_path: Path, undisturbed: dict
) -> None:
    with launched(tmp_path, *_RUN) as run:
        # In the order of a round: its plan, its end, its record; and before its trainers have said hello again.
        moments = (
            ("trainer_0", "transport.up", {"peer_role": "client"}),
            ("server_0", "ring.started", {"round": 1}),
            ("server_1", "round.swapped", {"round": 2}),
            ("client_0", "client.resumed", {"generation": 4}),
        )
        for start, (process, event, fields) in enumerate(moments, 1):
            if start > 1:
                # Where this test is slower than the run, the moment may have been before the last kill.
                run.saw("client_0", "client.resumed", generation=start)
            run.saw(process, event, **fields)
            os.kill(run.pid_of("client:0"), signal.SIGKILL)
        summary = ended_well(run)
        started = [event["role"] for event in run.events("launcher", "role.started")]
    _is_as_undisturbed(summary, undisturbed)
    assert [failover["kind"] for failover in summary["failovers"]] == ["client"] * 4
    # Of one that is killed again before anybody trains nothing is recovered.
    assert max(failover["recovered_after_s"] for failover in summary["failovers"]) > 0
    assert run.output.count("client@box1 has ended (killed by SIGKILL); it is started again") == 4
    assert (started.count("client:0"), started.count("trainer:0"), started.count("data_server:0")) == (5, 1, 1)


@pytest.mark.slow
def test_the_baseline_beside_a_swarm_goes_on_after_a_killed_data_server(tmp_path: Path) -> None:
    with launched(tmp_path, *_LONG_RUN, "--servers.replicas=1", "--baseline") as run:
        _kill_in_round_2(run, "data_server:0")
        run.saw("baseline_0", "data_server.dialled_again")
        reached = _step_of_the_baseline(run)
        until(lambda: _step_of_the_baseline(run) > reached + 2 * 8, START_S, "two rounds of the baseline")
        summary = interrupted(run)
    assert "baseline@box1 has ended" not in run.output
    assert summary["eval_loss_baseline"] < summary["eval_loss_first"]


def _step_of_the_baseline(run: Launched) -> float:
    return max((row.run.get("step/baseline", 0.0) for row in read_rows(run.require_log_dir())), default=0.0)


@pytest.mark.slow
def test_the_client_and_another_process_are_killed_at_once_again_and_again(tmp_path: Path) -> None:
    others = ["trainer:1", "data_server:0", "server:1", "monitor:0"]
    with launched(tmp_path, *_LONG_RUN) as run:
        for start, other in enumerate(others, 1):
            if start > 1:
                run.saw("client_0", "client.resumed", generation=start)
            reached = len(run.events("client_0", "round.recorded"))
            until(lambda reached=reached: len(run.events("client_0", "round.recorded")) > reached, START_S, "a record")
            for role in ("client:0", other):
                os.kill(run.pid_of(role), signal.SIGKILL)
        run.saw("client_0", "client.resumed", generation=len(others) + 1)
        reached = run.events("client_0", "round.recorded")[-1]["round"]
        run.saw("client_0", "round.recorded", round=reached + 2)
        summary = interrupted(run)
    kinds = [failover["kind"] for failover in summary["failovers"]]
    assert kinds.count("client") == len(others)
    assert set(kinds) == {"client", "trainer", "data_server", "server"}


@pytest.mark.slow
def test_a_client_that_dies_again_and_again_is_given_up_and_the_run_says_so(tmp_path: Path) -> None:
    with launched(tmp_path, *_LONG_RUN) as run:
        run.saw("client_0", "round.recorded", round=1)
        for start in range(6):
            if start:
                run.saw("client_0", "client.resumed", generation=start + 1)
            os.kill(run.pid_of("client:0"), signal.SIGKILL)
        assert run.ends(END_S) == 1, run.output
        run.leaves_nothing()
        assert "failed: client@box1 ended early: killed by SIGKILL" in run.output
        assert f"the logs of all roles are in {run.log_dir}" in run.output
        assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_stage_that_loses_both_replicas_goes_on_from_what_the_mirror_holds(tmp_path: Path) -> None:
    # Rounds enough that some are left when the mirror has come and the servers have been found and killed.
    with launched(tmp_path, *_RUN, "--diloco.outer-steps=40") as run:
        held = run.saw("mirror_0", "mirror.holds", within_s=90.0, stage=1)["round"]
        stages = {index: run.events(f"server_{index}", "server.ready")[0]["stage"] for index in range(4)}
        run.processes()
        for index in (index for index, stage in stages.items() if stage == 1):
            os.kill(run.pid_of(f"server:{index}"), signal.SIGKILL)
        ended_well(run, 40)
        records = [record for record, _ in read_records(run.log_dir)]
    assert "training has stopped: no server serves stage 1" in run.output
    assert "stage 1 is served again: training goes on" in run.output
    assert "initial parameters" not in run.output
    # A record may have been committed just before, and not have reached the mirror.
    assert all(o.restored is None or o.restored.round >= held for record in records for o in record.stages)


@pytest.mark.slow
def test_a_stage_that_loses_both_replicas_is_restored_and_the_run_says_what_is_lost(tmp_path: Path) -> None:
    with launched(tmp_path, *_RUN, "--no-param-mirror-enable") as run:
        run.saw("client_0", "round.recorded", within_s=90.0, round=1)
        run.saw("client_0", "round.recorded", round=2)
        stages = {index: run.events(f"server_{index}", "server.ready")[0]["stage"] for index in range(4)}
        run.processes()
        for index in (index for index, stage in stages.items() if stage == 1):
            os.kill(run.pid_of(f"server:{index}"), signal.SIGKILL)
        summary = ended_well(run)
        last = {index: run.events(f"server_{index}", "round.swapped")[-1] for index in range(4)}
        records = [record for record, _ in read_records(run.log_dir)]
        found = audit(run.log_dir, 10**6)
    assert "training has stopped: no server serves stage 1" in run.output
    assert "the state of stage 1 is lost: no server holds it any more" in run.output
    assert "stage 1 is served again: training goes on" in run.output
    # What the terminal and the summary say, the next record says as well.
    [said] = summary["stages_restored"]
    [(round, restored)] = [(r.round, o.restored) for r in records for o in r.stages if o.restored is not None]
    assert (said["stage"], said["in_round"], said["lost_rounds"]) == (1, round, [1, round - 1])
    assert (restored.round, restored.hashes.parameters) == (0, said["parameters"])
    assert summary["steps_lost"]["1"] >= 16 * (round - 1)
    assert found.steps_lost[1] == summary["steps_lost"]["1"]
    # One of stage 0 may have been sent to stage 1 meanwhile.
    for index in range(4):
        assert (last[index]["round"], last[index]["parameters"]) == (
            _ROUNDS,
            summary["hashes"][str(last[index]["stage"])],
        )


@pytest.mark.slow
def test_a_run_whose_servers_are_all_given_up_ends_with_an_error(tmp_path: Path) -> None:
    with launched(tmp_path, *_LONG_RUN, "--servers.num-servers=2") as run:
        run.saw("client_0", "round.recorded", round=1)
        for index in range(2):
            os.kill(run.pid_of(f"server:{index}"), signal.SIGTERM)
        assert run.ends(END_S) == 1, run.output
        run.leaves_nothing()
        assert "of the 2 servers that it takes are left, and none comes" in run.output
        assert "Traceback" not in run.output
