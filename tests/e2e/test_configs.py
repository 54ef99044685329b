"""Every configuration that is shipped trains in small: `make test-configs`.

Without its option, one for each task that no other test trains in small.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.e2e.launched import ROOT

from shoal.config import load_config
from shoal.config.training import DataConfig
from shoal_lab.small_runs import train_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = {"cv": "mlp"}
ELSEWHERE = {"llm": "gemma3_270m", "speech": "wav2vec2_split", "image_gen": "biggan_cifar"}
"""Trained in small by test_hf.py and, as their pages have them, by test_tasks.py, which look at more of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each file, or of one for each task."""
    if "name" not in metafunc.fixturenames:
        return
    every = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    is_wanted = metafunc.config.getoption("--every-config", default=False)
    metafunc.parametrize("name", every if is_wanted else sorted(HERE.values()))


@pytest.mark.usefixtures("forked_for_programs")
def test_a_configuration_trains_in_small_to_its_end(name: str, tmp_path: Path) -> None:
    run = train_small(ROOT / "configs" / f"{name}.yaml", tmp_path)
    assert run.problems == ()
    assert run.steps > 0


def test_there_is_one_for_each_task() -> None:
    one_for_each_task = HERE | ELSEWHERE
    configs = {task: load_config(ROOT / "configs" / f"{name}.yaml", (), {}) for task, name in one_for_each_task.items()}
    assert {task: config.data.task_type for task, config in configs.items()} == {task: task for task in configs}
    assert configs.keys() == set(get_args(DataConfig.model_fields["task_type"].annotation))
