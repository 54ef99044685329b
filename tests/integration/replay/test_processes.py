"""A replay in several processes is that of one: the same bits, the same findings; and none of them is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.integration.cluster.test_hf import QWEN, hf_config
from tests.integration.replay.conftest import alter_norm, change, peer_of_first_step

from shoal.cli import main
from shoal.config.dump import dump_config
from shoal.errors import RemoteError, SampleError
from shoal.replay.plan import plan_of
from shoal.replay.processes import Processes
from shoal.replay.replay import replay
from shoal.replay.run_files import read_run
from shoal.replay.verdict import Verdict
from shoal.runtime import child
from shoal.runtime.child import ChildFailed
from shoal.runtime.frames import framed
from shoal_lab import Cluster


def without_time(verdict: Verdict) -> dict[str, Any]:
    return {name: value for name, value in verdict.as_json().items() if name != "took_s"}


@pytest.mark.usual("4")
@pytest.mark.parametrize("num_processes", [2, 4])
def test_several_processes_come_to_the_same_hashes(folder: Path, num_processes: int) -> None:
    """With four of them each step goes through two processes or more, and so does each average."""
    homes = plan_of(read_run(folder)).homes(num_processes, 1)
    assert len(set(homes)) == num_processes
    told: list[tuple[int, int]] = []
    verdict = replay(folder, num_processes=num_processes, progress=lambda done, total, _: told.append((done, total)))
    assert verdict.agrees, verdict.differences
    assert without_time(verdict) == without_time(replay(folder))
    assert told == [(number + 1, verdict.steps) for number in range(verdict.steps)]


@pytest.mark.parametrize("is_tied", [False, True])
async def test_a_process_that_has_no_end_of_the_model_computes_its_stage(tmp_path: Path, is_tied: bool) -> None:
    """It reads no samples, and takes the number of their targets from the log."""
    config = hf_config(
        {**QWEN, "tie_word_embeddings": is_tied},
        model_pipeline={"stages": 3, "microbatches": 2},
        diloco={"inner_steps": 2, "outer_steps": 1},
        servers={"replicas": 1},
        data={"dataset_name": "pydoc-topics", "task_type": "llm", "seq_len": 16},
    )
    async with Cluster(config, log_dir=tmp_path) as cluster:
        await cluster.run()
        (tmp_path / "config.yaml").write_text(dump_config(config))
    assert plan_of(read_run(tmp_path)).homes(2, 1) == [0, 1, 0]
    verdict = await anyio.to_thread.run_sync(lambda: replay(tmp_path, num_processes=2))
    assert verdict.agrees, verdict.differences


@pytest.mark.slow
def test_several_processes_find_what_one_finds(folder: Path) -> None:
    for number in (2, 3):
        change(folder / f"steps/round_000{number}.jsonl", lambda lines: lines[::-1])
    peer = peer_of_first_step(folder)
    alter_norm(folder, peer, step=-1)
    found = replay(folder, num_processes=3)
    assert not found.agrees
    assert without_time(found) == without_time(replay(folder))


@pytest.mark.slow
def test_several_processes_come_as_far_as_one_where_logs_contradict_each_other(folder: Path) -> None:
    change(folder / "replicas/server2.1.jsonl", lambda lines: lines[: len(lines) // 2])
    found = replay(folder, num_processes=2)
    assert not found.agrees
    assert without_time(found) == without_time(replay(folder))


def test_a_process_that_is_killed_ends_the_replay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That no process is left is checked after every test."""
    started: list[subprocess.Popen[bytes]] = []
    start = child.start_interpreter

    def start_and_kill(*args: Any, **named: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **named))
        if len(started) == 2:
            started[1].kill()
        return started[-1]

    monkeypatch.setattr(child, "start_interpreter", start_and_kill)
    with pytest.raises(RemoteError, match="process 1 of the replay was killed by SIGKILL"):
        replay(folder, num_processes=2)
    assert len(started) == 2


def test_the_reason_that_a_process_gives_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has only lost the other one ends without a word; nobody takes it for the cause."""
    say = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(bytes.fromhex(sys.argv[2]))"
    words = iter(["", framed(ChildFailed("SampleError", "no sample 7")).hex()])

    def start(_module: str, fds: list[int], *, pass_fds: list[int], **_: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", say, str(fds[0]), next(words)], pass_fds=pass_fds)

    monkeypatch.setattr(child, "start_interpreter", start)
    with (
        Processes(tmp_path, [0, 1], on_step=lambda _: None) as engines,
        pytest.raises(SampleError, match="no sample 7"),
    ):
        list(engines.finish())


def test_a_process_is_not_started_for_few_steps(folder: Path) -> None:
    plan = plan_of(read_run(folder))
    assert set(plan.homes(4, 1000)) == {0}
    steps = plan.order().num_steps
    assert len(set(plan.homes(4, steps // 2))) == 2


def test_lives_with_several_threads_each_take_several_cores(folder: Path) -> None:
    for path in folder.glob("replicas/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["place"]["num_threads"] = 2
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = plan_of(read_run(folder))
    assert set(plan.homes(3, 1)) == {0}
    assert len(set(plan.homes(4, 1))) == 2


def test_no_process_at_all_is_the_users_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(folder), "--processes", "0"]) == 2
    assert "--processes 0: give a number of processes" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_takes_the_number_of_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the output is no terminal, a line for a new round says how far it is."""
    assert main(["replay", str(folder), "--processes", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["agrees"]
    rounds = [line.partition(",")[0] for line in captured.err.splitlines()]
    assert rounds == sorted(set(rounds))
    assert rounds[-1] == "round 3"
