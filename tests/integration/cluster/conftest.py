"""A tiny model on a small text, so that a whole run takes a fraction of a second."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.threads import one_thread as one_thread
from tests.tiers import is_thorough

from shoal.averaging.journal import read_records
from shoal.config import Config
from shoal.data.source import DataSet
from shoal.data.text import text_dataset
from shoal.replay.replay import replay
from shoal.replay.verdict import Verdict
from shoal_lab import Cluster, ClusterResult

SEQ_LEN = 16


def make_config(**sections: dict[str, Any]) -> Config:
    """A configuration of tests; each section's values replace those below."""
    values: dict[str, dict[str, Any]] = {
        "run": {"deterministic": True, "seed": 3},
        "data": {"seq_len": SEQ_LEN},
        "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "dropout": 0.1},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 4, "outer_steps": 3, "batch_size_per_step": 4, "averaging_timeout_s": 20.0},
        "servers": {"replicas": 2},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return Config.model_validate({"device": "cpu", "wandb": False, **values})


def make_text(num_train: int, num_holdout: int = 6) -> DataSet:
    """Text of exactly that many samples."""
    generator = np.random.Generator(np.random.Philox(5))
    num_bytes = (num_train + num_holdout) * SEQ_LEN + 2
    text = generator.integers(97, 123, num_bytes, dtype=np.uint8).tobytes()
    dataset = text_dataset("letters", text, SEQ_LEN, num_holdout / (num_train + num_holdout))
    assert (dataset.train.num_samples, dataset.holdout.num_samples) == (num_train, num_holdout)
    return dataset


async def run_noticed(cluster: Cluster) -> tuple[ClusterResult, list[str]]:
    """Run it to its end; return also what the user is shown."""
    notices: list[str] = []
    cluster.client.ledger.show = notices.append
    return await cluster.run(), notices


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeCluster]:
    """Clusters with files of their own.

    Each run is replayed at the end of its test: whatever faults it had, it has to come to the recorded hashes again.
    Not so one whose replicas are made to compute wrongly (`wrong_arithmetic`), and `make test` replays one in five.
    """
    number = 0
    made: list[tuple[Path, Config, DataSet | None]] = []

    def make(config: Config, *, num_train: int = 1000, **options: Any) -> Cluster:
        nonlocal number
        number += 1
        log_dir = tmp_path / f"run{number}"
        log_dir.mkdir()
        options.setdefault("dataset", make_text(num_train))
        made.append((log_dir, config, options["dataset"]))
        return Cluster(config, log_dir=log_dir, **options)

    yield make
    if request.node.get_closest_marker("wrong_arithmetic") or not is_thorough(request.node):
        return
    for log_dir, config, dataset in made:
        if (log_dir / "rounds/round_0001.json").exists():
            folder = whole_folder(log_dir)
            # A test may have replayed it itself.
            if _reproduced.get(folder) != _recorded(folder):
                reproduces(folder, config, dataset)


def whole_folder(log_dir: Path) -> Path:
    """Return the folder of the client that led at the end, with what it lacks of the first rounds from other hosts."""
    records = {
        folder: [record for record, _ in read_records(folder)]
        for folder in (log_dir, *sorted(log_dir.parent.glob(f"{log_dir.name}-host*")))
    }
    leader = max((folder for folder in records if records[folder]), key=lambda folder: records[folder][-1].ballot)
    first = records[leader][0].round
    for folder in records:
        earlier = [*folder.glob("rounds/round_*.json"), *folder.glob("steps/round_*.jsonl")]
        for path in [path for path in earlier if int(path.stem.removeprefix("round_")) <= first]:
            _copy_missing(path, leader / path.relative_to(folder))
        for path in folder.glob("replicas/*"):
            _copy_missing(path, leader / path.relative_to(folder))
    return leader


def _copy_missing(path: Path, place: Path) -> None:
    place.parent.mkdir(exist_ok=True)
    if not place.exists():
        shutil.copy(path, place)


def reproduces(log_dir: Path, config: Config, dataset: DataSet | None) -> Verdict:
    """Replay a run and check that everything agrees; return what was found."""
    verdict = replay(log_dir, config=config, dataset=dataset)
    assert verdict.agrees, verdict.differences
    assert (verdict.repeated, verdict.missing) == (0, 0)
    assert verdict.rounds_agreed == verdict.rounds
    _reproduced[log_dir] = _recorded(log_dir)
    return verdict


_reproduced: dict[Path, set[tuple[Path, int]]] = {}
"""What was recorded in each folder that was replayed."""


def _recorded(log_dir: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in log_dir.glob("*/round_*")}


_undisturbed: dict[tuple[str, int], ClusterResult] = {}


async def run_undisturbed(make_cluster: MakeCluster, config: Config, num_train: int = 1000) -> ClusterResult:
    """What a deterministic run comes to when nothing happens in it: the same for all tests, so it is run once."""
    assert config.run.deterministic
    key = config.model_dump_json(), num_train
    if key not in _undisturbed:
        async with make_cluster(config, num_train=num_train) as cluster:
            _undisturbed[key] = await cluster.run()
    return _undisturbed[key]
