"""Adapters on a frozen model through the real command: trained, computed again, loaded by peft on their base."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tests.e2e.launched import completed, run_shoal

from shoal.checkpoint.loading import open_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Of peft, when it wraps a model of a newer transformers.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}


def _file(tmp_path: Path, model: dict[str, Any], **lora: Any) -> str:
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {"seq_len": 64, "holdout_fraction": 0.005},
        "model": {"family": "hf", **model},
        "lora": {"r": 8, "alpha": 16, **lora},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {
            "inner_optim": {"type": "adam", "adam_lr": 0.01},
            "inner_steps": 8,
            "outer_steps": 3,
            "batch_size_per_step": 8,
        },
        "servers": {"replicas": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def test_adapters_on_weights_of_a_folder_train_and_are_loaded_by_peft(
    tmp_path: Path, transformers: ModuleType, peft: ModuleType
) -> None:
    folder = tmp_path / "base"
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **_SIZES)).eval()
    theirs.save_pretrained(folder)
    run = completed(
        tmp_path, _file(tmp_path, {"name_or_path": str(folder), "pretrained": True}), "--servers.replicas=1"
    )
    summary = run.summary()
    assert (summary["stages"], summary["outer_rounds"], summary["exit"]) == (2, 3, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    # Near ln 256 at first.
    assert 5.2 < summary["eval_loss_first"] < 6.0
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - 0.05
    assert run.log_dir is not None
    run_shoal("replay", str(run.log_dir))
    evaluated = json.loads(run_shoal("evaluate", str(run.log_dir), "--json"))
    assert evaluated["eval_loss"] == pytest.approx(summary["eval_loss_last"], abs=1e-6)
    home = tmp_path / "home"
    run_shoal("export", str(run.log_dir), "--to", str(home))
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        ours, plain = open_model(run.log_dir).whole()(tokens), theirs(input_ids=tokens, use_cache=False).logits
        for left in (home, run.log_dir / "model"):
            base = transformers.AutoModelForCausalLM.from_pretrained(folder)
            adapted = peft.PeftModel.from_pretrained(base, str(left)).eval()
            assert torch.equal(adapted(input_ids=tokens, use_cache=False).logits, ours)
    assert not torch.equal(plain, ours)
    merged = tmp_path / "merged"
    run_shoal("export", str(run.log_dir), "--to", str(merged), "--merge")
    evaluated = json.loads(run_shoal("evaluate", str(merged), "--json"))
    assert evaluated["eval_loss"] == pytest.approx(summary["eval_loss_last"], abs=1e-3)


def test_adapters_on_random_weights_need_no_file_and_two_processes_compute_them_again(tmp_path: Path) -> None:
    model = {"extra": {"model_type": "qwen3", **_SIZES, "tie_word_embeddings": True}}
    run = completed(tmp_path, _file(tmp_path, model, base_dtype="bfloat16"))
    summary = run.summary()
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - 0.05
    assert run.log_dir is not None
    run_shoal("replay", str(run.log_dir), "--processes=2")
