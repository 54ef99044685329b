"""A run on files with a tokenizer of its own, twice: its tokens are made once, and its model speaks by it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.e2e.launched import completed, run_shoal
from tests.unit.data.corpora import write_json_lines, write_parquet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_ANIMALS = ("birds", "wolves", "déjà vus", "otters", "moles")


def _texts(first: int) -> list[str]:
    return [
        f"Number {number}: the {_ANIMALS[number % 5]} of the woods saw {number % 7} {_ANIMALS[number % 3]} there."
        for number in range(first, first + 400)
    ]


def _file(tmp_path: Path, corpus: Path) -> str:
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {"dataset_name": str(corpus), "tokenizer": "train:512", "seq_len": 32},
        "model": {"hidden_size": 48, "vocab_size": 512},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 6, "outer_steps": 2, "batch_size_per_step": 4},
        "servers": {"replicas": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_a_run_with_a_tokenizer_of_its_own_makes_tokens_once_and_its_model_speaks_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformers: ModuleType
) -> None:
    corpus = tmp_path / "corpus"
    write_json_lines(corpus / "a.jsonl", _texts(0))
    write_parquet(corpus / "b.parquet", _texts(400))
    first = completed(tmp_path, _file(tmp_path, corpus))
    assert "training a tokenizer of 512 tokens" in first.output
    (built,) = first.events("data_server_0", "tokens.built")
    assert built["documents"] == 800
    summaries = [first.summary()]
    again = completed(tmp_path, _file(tmp_path, corpus))
    summaries.append(again.summary())
    assert not again.events("data_server_0", "tokens.built")
    assert "training a tokenizer" not in again.output
    for summary in summaries:
        assert (summary["duplicates"], summary["missing"]) == (0, 0)
        # Near ln 512 at first.
        assert 6.0 < summary["eval_loss_first"] < 6.6
        assert summary["eval_loss_last"] < summary["eval_loss_first"]
    assert summaries[0]["eval_loss_first"] == pytest.approx(summaries[1]["eval_loss_first"], abs=1e-5)
    # What the run has left is enough: this host keeps nothing of it any more.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert again.log_dir is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(again.log_dir / "model" / "tokenizer")
    said = json.loads(run_shoal("generate", str(again.log_dir), "--prompt=the birds of", "--max-tokens=8", "--json"))
    assert said["prompt_tokens"] == len(tokenizer("the birds of")["input_ids"])
    assert said["text"] == tokenizer.decode(said["tokens"])
    home = tmp_path / "home"
    run_shoal("export", str(again.log_dir), "--to", str(home))
    exported = transformers.AutoTokenizer.from_pretrained(home)
    assert exported("the birds of")["input_ids"] == tokenizer("the birds of")["input_ids"]
    assert json.loads((home / "config.json").read_text())["eos_token_id"] == exported.eos_token_id is not None
    run_shoal("replay", str(again.log_dir))
