"""What is started before the configuration is read, and what is asked of it once that is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.cli import early as early_module
from shoal.cli.early import EarlyStart, early_start
from shoal.config import Config
from shoal.errors import RemoteError

_HF: dict[str, Any] = {"model": {"family": "hf", "extra": {"model_type": "qwen3"}}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"model": {"family": "own.package:Own"}}, []),
        (_HF, ["shoal.model.hf.preloaded:qwen3"]),
        ({**_HF, "lora": {}}, ["shoal.model.hf.preloaded:qwen3", "peft"]),
        ({"model": {"family": "hf", "hf_config": {"model_type": "gpt2"}}}, ["shoal.model.hf.preloaded:gpt2"]),
        ({"model": {"family": "hf", "extra": {"model_type": 2}}}, ["shoal.model.hf.preloaded"]),
    ],
    ids=["gpt", "own", "hf", "adapters", "from a folder", "no kind"],
)
def test_what_a_model_needs_is_imported_once_for_all_roles(values: dict[str, Any], expected: list[str]) -> None:
    asked: list[str] = []
    early = EarlyStart(cast(Any, None), cast(Any, SimpleNamespace(preload=asked.extend)), cast(Any, None))
    early.preload_for(Config.model_validate(values))
    assert asked == expected


def test_a_system_that_refuses_another_process_is_a_sentence_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(early_module, "ForkServers", refused)
    with pytest.raises(RemoteError, match=r"Resource temporarily unavailable.*ulimit -u"), early_start():
        pass
    assert not [path for path in tmp_path.glob("shoal-*/*") if path.is_dir()]
