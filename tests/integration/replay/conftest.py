"""One run with faults for all tests of replays, and ways to change the copy of its folder that each test has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tests.integration.cluster.conftest import make_config

from shoal.config.dump import dump_config
from shoal.identity import Identity
from shoal.wire.messages.step import Commit, Forward
from shoal_lab import Cluster

CONFIG = make_config(
    run={"deterministic": False},
    diloco={
        "inner_steps": 3,
        "outer_steps": 3,
        "load_state_timeout_s": 20.0,
        "averaging_compression": "sparse",
        "inner_optim": {"type": "muon"},
        "inner_state": "reset",
        "lr_schedule": {"type": "wsd", "warmup_steps": 2, "decay_fraction": 0.5},
    },
    data={"dataset_name": "pydoc-topics", "task_type": "llm", "seq_len": 16},
)
VICTIM = 3
"""A server of stage 1."""


async def _train(log_dir: Path) -> Identity:
    """Train a run in which a server is killed between prepare and commit and started again, and then a trainer."""
    async with Cluster(CONFIG, log_dir=log_dir) as cluster:

        def kill() -> None:
            cluster.kill_server(VICTIM)
            cluster._tasks.start_soon(cluster.restart_server, VICTIM)

        cluster.when(Commit, action=kill, receiver=cluster.servers[VICTIM].peer, number=2)
        cluster.when(Forward, action=lambda: cluster.kill_trainer(0), sender=cluster.trainer_peer(0), number=8)
        with anyio.fail_after(240):
            await cluster.run()
        (log_dir / "config.yaml").write_text(dump_config(CONFIG))
        return cluster.host.identity


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Identity]:
    """The folder of a run that nobody changes, and who has signed its records."""
    torch.set_num_threads(1)
    log_dir = tmp_path_factory.mktemp("trained") / "run"
    log_dir.mkdir()
    return log_dir, anyio.run(_train, log_dir, backend="asyncio")


@pytest.fixture
def folder(trained: tuple[Path, Identity], tmp_path: Path) -> Path:
    """A copy of it to change."""
    return shutil.copytree(trained[0], tmp_path / "run")


def change(path: Path, edit: Callable[[list[Any]], list[Any]]) -> None:
    """Edit a file of JSON lines."""
    lines = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def peer_of_first_step(folder: Path) -> str:
    """The replica that the first line of the first round's step log is of."""
    return json.loads((folder / "steps/round_0001.jsonl").read_text().splitlines()[0])["peer"]


def alter_norm(folder: Path, peer: str, *, step: int) -> None:
    """Say in a replica's own log that one of its steps had another gradient."""

    def alter(lines: list[Any]) -> list[Any]:
        [line for line in lines if line["event"] == "applied"][step]["squared_norm"] *= 1 + 2**-50
        return lines

    change(folder / f"replicas/{peer}.1.jsonl", alter)
