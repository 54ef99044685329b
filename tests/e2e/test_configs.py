"""Every configuration that is shipped trains in small: `make test-configs`. Without its option, one for each task."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.e2e.launched import ROOT

from shoal.config import load_config
from shoal.config.training import DataConfig
from shoal.testing.small_runs import train_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ONE_FOR_EACH_TASK = {"llm": "gptneo_split", "cv": "mlp", "image_gen": "biggan_cifar", "speech": "wav2vec2_split"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each file, or of one for each task."""
    if "name" not in metafunc.fixturenames:
        return
    every = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    is_wanted = metafunc.config.getoption("--every-config", default=False)
    metafunc.parametrize("name", every if is_wanted else sorted(ONE_FOR_EACH_TASK.values()))


def test_a_configuration_trains_in_small_to_its_end(name: str, tmp_path: Path) -> None:
    run = train_small(ROOT / "configs" / f"{name}.yaml", tmp_path)
    assert run.problems == ()
    assert run.steps > 0


def test_there_is_one_for_each_task() -> None:
    configs = [load_config(ROOT / "configs" / f"{name}.yaml", (), {}) for name in ONE_FOR_EACH_TASK.values()]
    assert [config.data.task_type for config in configs] == list(ONE_FOR_EACH_TASK)
    assert set(ONE_FOR_EACH_TASK) == set(get_args(DataConfig.model_fields["task_type"].annotation))
