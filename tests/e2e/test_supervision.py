"""What keeps a run together is killed in the middle of it: the fork server, the DHT daemons, and then the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ENDLESS, FEW, START_S, Launched, launched, until
from tests.e2e.test_faults import interrupted

from shoal.runtime.process_info import read_stat
from shoal_lab.observed import p2pd_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_NOTICE = "the fork server has ended (killed by SIGKILL); it is started again, roles go on"


def _kill_fork_server(run: Launched) -> None:
    run.processes()
    os.kill(run.fork_server(), signal.SIGKILL)


def _started(run: Launched, role: str) -> list[int]:
    return [event["pid"] for event in run.events("launcher", "role.started") if event["role"] == role]


def test_training_goes_on_without_its_fork_server_and_the_next_one_starts_a_killed_server_again(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *ENDLESS, "--diloco.inner-steps=8") as run:
        run.saw("client_0", "round.recorded", round=1)
        roles = ["client:0", "data_server:0", "monitor:0", "mirror:0", *(f"server:{i}" for i in range(4))]
        roles += [f"trainer:{i}" for i in range(2)]
        pids = {role: run.pid_of(role) for role in roles}
        _kill_fork_server(run)
        run.saw("launcher", "fork_server.preloaded", pid=run.saw("launcher", "fork_server.restarted")["pid"])
        assert {role: _started(run, role) for role in roles} == {role: [pid] for role, pid in pids.items()}
        # Adopted as it is, it is followed as before.
        os.kill(pids["server:1"], signal.SIGKILL)
        run.saw("server_1", "state.fetched")
        stat = read_stat(run.pid_of("server:1"))
        assert stat is not None
        assert stat.parent_pid == run.fork_server()
        # It takes part again, with the bytes of its stage.
        reached = run.events("client_0", "round.recorded")[-1]["round"]
        recorded = run.saw("client_0", "round.recorded", round=reached + 2)
        swapped = run.saw("server_1", "round.swapped", round=reached + 2)
        summary = interrupted(run)
        assert len(run.events("launcher", "fork_server.ended")) == 1
        restarted = {role: len(_started(run, role)) for role in roles}
    assert swapped["parameters"] in recorded["hashes"].values()
    assert run.output.count(_NOTICE) == 1
    assert restarted == {role: 2 if role == "server:1" else 1 for role in roles}
    # The death of the fork server itself stops nobody.
    assert [failover["kind"] for failover in summary["failovers"]] == ["server"]


def test_a_run_that_is_killed_after_its_fork_server_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded")
        _kill_fork_server(run)
        run.saw("launcher", "fork_server.restarted")
        # The next one imports for seconds; a role that is frozen meanwhile is nobody's but its to end.
        os.kill(run.pid_of("server:1"), signal.SIGSTOP)
        run.kill()
        run.ends(END_S)
        run.leaves_nothing()


def test_a_run_that_is_killed_together_with_its_fork_server_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded")
        pid = run.fork_server()
        run.processes()
        os.kill(pid, signal.SIGKILL)
        run.kill()
        run.ends(END_S)
        run.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ctrl_c_right_after_the_loss_of_the_fork_server_ends_the_run_in_time(
    number: signal.Signals, tmp_path: Path
) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded")
        run.processes()
        os.kill(run.fork_server(), number)
        run.interrupt()
        assert run.ends(END_S) == 130, run.output
        run.leaves_nothing()
        assert run.summary()["exit"] == "interrupted"
        assert "Traceback" not in run.output


def test_a_run_whose_fork_server_is_killed_again_and_again_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW) as run:
        run.saw("client_0", "round.recorded")
        for turn in range(6):
            until(lambda turn=turn: len(run.events("launcher", "fork_server.restarted")) == turn, START_S, "the next")
            _kill_fork_server(run)
        assert run.ends(END_S) == 1
        assert "failed: the fork server has ended 6 times within 60 s" in run.output
        assert "Traceback" not in run.output
        run.leaves_nothing()


def test_the_dht_daemon_of_a_host_is_killed_and_then_who_has_it_and_the_swarm_stays_as_open_as_it_was(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, *ENDLESS, "--diloco.inner-steps=8") as run:
        run.saw("client_0", "round.recorded", round=1)
        (killed,) = p2pd_of(run)
        os.kill(killed, signal.SIGKILL)
        run.saw("monitor_0", "registry.dht_back")
        (back,) = p2pd_of(run)
        assert back != killed
        num_seen = len(run.events("client_0", "registry.dht_back"))
        os.kill(run.pid_of("monitor:0"), signal.SIGKILL)
        until(lambda: len(run.events("client_0", "registry.dht_back")) > num_seen, START_S, "the next node")
        until(lambda: len(run.events("monitor_0", "transport.up")) >= 2, START_S, "the next monitor")
        # Who comes now finds the swarm: it is told of the monitor's first address as well, where nobody is any more.
        os.kill(run.pid_of("server:3"), signal.SIGKILL)
        run.saw("server_3", "state.fetched")
        summary = interrupted(run)
        started = {role: len(_started(run, role)) for role in ("client:0", "monitor:0", "server:1", "server:2")}
    assert started == {"client:0": 1, "monitor:0": 2, "server:1": 1, "server:2": 1}
    assert [failover["kind"] for failover in summary["failovers"]] == ["server"]
