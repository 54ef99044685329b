"""`shoal model check`: which model it is that a name means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.model.hf.families import values_of

from shoal.cli.model import print_check
from shoal.config import Config


@pytest.mark.parametrize(
    ("has_config", "found"), [(True, "llama of transformers"), (False, "qwen3 of transformers")], ids=["model", "empty"]
)
def test_a_folder_that_is_named_like_a_kind_is_the_model_in_it(
    has_config: bool, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "qwen3"
    folder.mkdir()
    if has_config:
        (folder / "config.json").write_text(json.dumps(values_of("llama")))
    print_check("qwen3", Config.model_validate({"model": {"family": "hf"}, "data": {"seq_len": 12}}))
    assert capsys.readouterr().out.startswith(found)
