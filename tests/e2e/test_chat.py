"""A run on conversations: answers alone are trained on, several conversations share a sample, and its model answers.

Adapters are trained on conversations by the page docs/tasks/chat.md (test_tasks.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.e2e.launched import completed, run_shoal
from tests.unit.data.test_packed_texts import tokenizer, turns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _file(tmp_path: Path) -> str:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = (json.dumps({"messages": turns(number)}) for number in range(600))
    (corpus / "train.jsonl").write_text("\n".join(rows))
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {
            "dataset_name": str(corpus),
            "tokenizer": str(tokenizer(tmp_path / "tokenizer")),
            "messages_column": "messages",
            "seq_len": 128,
        },
        "model": {
            "family": "hf",
            "extra": {
                "model_type": "qwen3",
                "vocab_size": 256,
                "hidden_size": 48,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
        },
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 8, "outer_steps": 2, "batch_size_per_step": 4, "inner_optim": {"adam_lr": 0.01}},
        "servers": {"replicas": 1},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_conversations_are_trained_on_packed_and_the_model_goes_home_with_its_template(
    tmp_path: Path, transformers: ModuleType
) -> None:
    run = completed(tmp_path, _file(tmp_path))
    summary = run.summary()
    assert (summary["outer_rounds"], summary["exit"]) == (2, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert 5.0 < summary["eval_loss_first"] < 6.3
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - 1
    (built,) = run.events("data_server_0", "tokens.built")
    assert built["documents"] == 600
    log_dir = run.require_log_dir()
    run_shoal("replay", str(log_dir))
    report = json.loads(run_shoal("evaluate", str(log_dir / "model"), "--json"))
    assert report["eval_loss"] == pytest.approx(summary["eval_loss_last"], abs=1e-4)
    home = tmp_path / "home"
    run_shoal("export", str(log_dir), f"--to={home}")
    template = transformers.AutoTokenizer.from_pretrained(home).apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert template == "<user>hi\x03<assistant>"
