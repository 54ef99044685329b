"""A run seen from outside: its logs, read further while they are written and renamed, and its processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shoal_lab.event_log import EventLog
from shoal_lab.launched import Launched
from shoal_lab.observed import Swarm


def _write(path: Path, *events: dict[str, Any]) -> None:
    with path.open("a") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")


def _at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}.000+00:00"


@pytest.fixture
def run(tmp_path: Path) -> Launched:
    (tmp_path / "logs" / "sandbox-1").mkdir(parents=True)
    return Launched(tmp_path, (), runtime_dir=tmp_path / "runtime")


def test_a_line_that_is_half_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    _write(path, {"event": "one"})
    path.write_text(path.read_text() + '{"event": "tw')
    log = EventLog(path)
    assert [event["event"] for event in log.read()] == ["one"]
    path.write_text(path.read_text() + 'o"}\n')
    assert [event["event"] for event in log.read()] == ["one", "two"]


def test_a_log_that_was_renamed_is_read_to_its_end_before_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    _write(path, {"event": "one"})
    log = EventLog(path)
    log.read()
    _write(path, {"event": "two"})
    path.rename(tmp_path / "a.log.1")
    _write(path, {"event": "three"})
    assert [event["event"] for event in log.read()] == ["one", "two", "three"]
    _write(path, {"event": "four"})
    assert [event["event"] for event in log.read()][-1] == "four"


def test_a_number_that_is_somebody_elses_by_now_is_not_taken_for_a_process_of_the_run(run: Launched) -> None:
    # This process lives, and carries no tag of the run.
    _write(run.require_log_dir() / "launcher.log", {"event": "role.started", "role": "server:1", "pid": os.getpid()})
    assert run.pid_of("server:1") == os.getpid()
    with pytest.raises(ProcessLookupError, match="server:1 does not run"):
        run.living_pid_of("server:1")


def _step(second: int, slot: int, *path: str) -> dict[str, Any]:
    event = {"event": "step.committed", "time": _at(second), "key": [slot, 1, second, 0], "path": path, "samples": 4}
    return {"slot": slot, **event}


def _swarm(run: Launched, *steps: dict[str, Any], swapped_at: int | None) -> Swarm:
    folder = run.require_log_dir()
    _write(folder / "server_0.log", {"event": "server.ready", "time": _at(0), "peer": "A", "stage": 0})
    if swapped_at is not None:
        _write(folder / "server_0.log", {"event": "round.swapped", "time": _at(swapped_at), "round": 3, "stage": 0})
    for step in steps:
        _write(folder / f"trainer_{step['slot']}.log", step)
    return Swarm(run, [run], 2)


def test_a_swarm_is_whole_when_the_dead_server_is_back_and_each_trainer_has_a_path_of_its_own(run: Launched) -> None:
    shared = [_step(20, 0, "B", "X"), _step(21, 1, "B", "Y")]
    own = [_step(22, 0, "A", "X"), _step(23, 1, "B", "Y")]
    swarm = _swarm(run, *shared, *own, swapped_at=15)
    [server] = swarm.servers
    began_s = swarm.steps(0)[0].at_s - 20
    assert swarm.whole_at_s(server, began_s + 10) == began_s + 22
    assert not swarm.is_whole(server, began_s + 16)
    assert sum(step.samples for step in swarm.steps_between(began_s + 20, began_s + 22)) == 8


def test_a_swarm_whose_server_has_no_state_yet_is_not_whole(run: Launched) -> None:
    swarm = _swarm(run, _step(22, 0, "C", "X"), _step(23, 1, "B", "Y"), swapped_at=None)
    assert not swarm.is_whole(swarm.servers[0], 0.0)


def test_a_swarm_in_which_a_trainer_has_not_stepped_since_is_not_whole(run: Launched) -> None:
    swarm = _swarm(run, _step(22, 0, "A", "X"), _step(10, 1, "B", "Y"), swapped_at=15)
    assert not swarm.is_whole(swarm.servers[0], 0.0)
