"""What is started before the configuration is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.early import seems_of_transformers

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("file", "flags", "seems"),
    [
        (None, (), False),
        (None, ("--model.family=hf",), True),
        (None, ("--no-wandb", "--model.family", "hf"), True),
        (None, ("--model-family", "hf"), True),
        (None, ("--model.family=hfx:Class",), False),
        ("configs/qwen3_tiny.yaml", (), True),
        ("configs/sandbox.yaml", (), False),
        ("configs/sandbox.yaml", ("--model.family=hf",), True),
        ("configs/nowhere.yaml", (), False),
    ],
)
def test_a_run_of_a_model_of_transformers_is_known_before_its_configuration_is_read(
    file: str | None, flags: tuple[str, ...], seems: bool
) -> None:
    assert seems_of_transformers(None if file is None else ROOT / file, flags) == seems
