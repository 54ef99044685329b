"""A tiny model on a small text, so that a whole run takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from shoal.config import Config
from shoal.data.source import DataSet
from shoal.data.text import text_dataset
from shoal.testing import Cluster, ClusterResult

SEQ_LEN = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


MakeCluster = Callable[..., Cluster]


@pytest.fixture
def make_cluster(tmp_path: Path) -> MakeCluster:
    """Clusters with files of their own."""
    number = 0

    def make(config: Config, *, num_train: int = 1000, **options: Any) -> Cluster:
        nonlocal number
        number += 1
        log_dir = tmp_path / f"run{number}"
        log_dir.mkdir()
        options.setdefault("dataset", make_text(num_train))
        return Cluster(config, log_dir=log_dir, **options)

    return make


_undisturbed: dict[tuple[str, int], ClusterResult] = {}


async def run_undisturbed(make_cluster: MakeCluster, config: Config, num_train: int = 1000) -> ClusterResult:
    """What a deterministic run comes to when nothing happens in it: the same for all tests, so it is run once."""
    assert config.run.deterministic
    key = config.model_dump_json(), num_train
    if key not in _undisturbed:
        async with make_cluster(config, num_train=num_train) as cluster:
            with anyio.fail_after(60):
                _undisturbed[key] = await cluster.run()
    return _undisturbed[key]
