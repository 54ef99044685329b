"""What is started before the configuration is read, and what is asked of it once that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli.early import EarlyStart
from shoal.config import Config

_HF: dict[str, Any] = {"model": {"family": "hf", "extra": {"model_type": "qwen3"}}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"model": {"family": "own.package:Own"}}, []),
        (_HF, ["shoal.model.hf.preloaded"]),
        ({**_HF, "lora": {}}, ["shoal.model.hf.preloaded", "peft"]),
    ],
    ids=["gpt", "own", "hf", "adapters"],
)
def test_what_a_model_needs_is_imported_once_for_all_roles(values: dict[str, Any], expected: list[str]) -> None:
    asked: list[str] = []
    early = EarlyStart(cast(Any, None), cast(Any, SimpleNamespace(preload=asked.extend)), cast(Any, None))
    early.preload_for(Config.model_validate(values))
    assert asked == expected
