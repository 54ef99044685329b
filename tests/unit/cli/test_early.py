"""What is started before the configuration is read, and what is asked of it once that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.early import EarlyStart
from shoal.config.model import ModelConfig


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelConfig(), []),
        (ModelConfig(family="own.package:Own"), []),
        (ModelConfig(family="hf", extra={"model_type": "qwen3"}), ["shoal.model.hf.preloaded"]),
    ],
    ids=["gpt", "own", "hf"],
)
def test_what_a_model_needs_is_imported_once_for_all_roles(model: ModelConfig, expected: list[str]) -> None:
    asked: list[str] = []
    early = EarlyStart(cast(Any, None), cast(Any, SimpleNamespace(preload=asked.extend)), cast(Any, None))
    early.preload_for(model)
    assert asked == expected
