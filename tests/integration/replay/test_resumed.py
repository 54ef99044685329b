"""A run in which a server has gone on from a snapshot is replayed, whichever processes compute its two generations."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
import torch
from tests.integration.cluster.conftest import make_config
from tests.integration.replay.conftest import change

from shoal.config.dump import dump_config
from shoal.errors import ConfigError
from shoal.replay.plan import plan_of
from shoal.replay.replay import replay
from shoal.replay.run_files import read_run
from shoal.wire.messages.snapshot import SnapshotKept
from shoal_lab import Cluster

CONFIG = make_config(
    diloco={"inner_steps": 8, "outer_steps": 2, "snapshot_every_steps": 1},
    data={"dataset_name": "pydoc-topics", "task_type": "llm", "seq_len": 16},
)
VICTIM = 1


async def _train(log_dir: Path) -> None:
    async with Cluster(CONFIG, log_dir=log_dir, replicas=[0, 1]) as cluster:

        def kill() -> None:
            cluster.kill_server(VICTIM)
            cluster._tasks.start_soon(cluster.restart_server, VICTIM)

        cluster.when(SnapshotKept, action=kill, receiver=cluster.servers[VICTIM].peer)
        with anyio.fail_after(240):
            await cluster.run()
        (log_dir / "config.yaml").write_text(dump_config(CONFIG))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    log_dir = tmp_path / "run"
    log_dir.mkdir()
    anyio.run(_train, log_dir, backend="asyncio")
    return log_dir


@pytest.mark.slow
def test_one_process_and_one_for_each_life_come_to_the_recorded_hashes(folder: Path) -> None:
    events = [json.loads(line)["event"] for line in (folder / "replicas/server1.2.jsonl").read_text().splitlines()]
    assert events[:3] == ["started", "loaded", "resumed"]
    assert len(set(plan_of(read_run(folder)).homes(3, 1))) == 3
    for num_processes in (1, 3):
        verdict = replay(folder, num_processes=num_processes)
        assert verdict.agrees, verdict.differences


def test_a_life_that_says_it_went_on_from_elsewhere_is_found_out(folder: Path) -> None:
    def earlier(lines: list[dict[str, object]]) -> list[dict[str, object]]:
        return [{**line, "commits": 0} if line["event"] == "resumed" else line for line in lines]

    change(folder / "replicas/server1.2.jsonl", earlier)
    assert not replay(folder, num_processes=1).agrees


def test_a_run_whose_earlier_life_is_missing_says_what_to_copy(folder: Path) -> None:
    (folder / "replicas/server1.1.jsonl").unlink()
    with pytest.raises(ConfigError, match="snapshot of generation 1 of server server1"):
        replay(folder, num_processes=1)
