"""A model of transformers through the real command: from its folder to a model that is taken home, or refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import yaml
from tests.e2e.launched import ROOT, SMALL, completed, launched, run_shoal

from shoal.checkpoint.loading import open_model
from shoal_lab.small_runs import train_small

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def _file(tmp_path: Path, **model: object) -> str:
    values = {
        "wandb": False,
        "run": {"deterministic": True},
        "data": {"seq_len": 64, "holdout_fraction": 0.005},
        "model": {"family": "hf", **model},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": 4, "outer_steps": 2, "batch_size_per_step": 4},
        "servers": {"replicas": 2},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return f"--config-path={tmp_path / 'run.yaml'}"


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


def test_a_qwen3_of_a_folder_trains_in_two_stages_and_is_computed_again_without_the_folder(
    tmp_path: Path, transformers: ModuleType
) -> None:
    folder = _folder(tmp_path)
    run = completed(tmp_path, _file(tmp_path, name_or_path=str(folder), tie=False), "--servers.replicas=1")
    shutil.rmtree(folder)
    summary = run.summary()
    assert (summary["stages"], summary["outer_rounds"], summary["exit"]) == (2, 2, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    # Near ln 256 at first.
    assert 5.2 < summary["eval_loss_first"] < 6.0
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    assert run.log_dir is not None
    run_shoal("replay", str(run.log_dir))
    home = tmp_path / "home"
    run_shoal("export", str(run.log_dir), "--to", str(home))
    evaluated = json.loads(run_shoal("evaluate", str(home), "--json"))
    assert evaluated["eval_loss"] == pytest.approx(summary["eval_loss_last"], abs=1e-6)
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(home), torch.arange(64)[None]
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=tokens, use_cache=False).logits, open_model(home).whole()(tokens))


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_tied_embeddings_train_over_a_cut_and_outlive_a_kill_of_the_stage_that_has_both_ends(
    tmp_path: Path, kind: str, transformers: ModuleType
) -> None:
    # What a Gemma 3 ties by itself, the folder of the Qwen3 says.
    extra = {name: value for name, value in _CONFIG.items() if type(value) is int} | {"model_type": kind}
    model = {"name_or_path": str(_folder(tmp_path))} if kind == "qwen3" else {"extra": extra}
    with launched(tmp_path, _file(tmp_path, **model), "--diloco.outer-steps=6") as run:
        run.saw("client_0", "round.recorded", round=1)
        run.processes()
        stage_of = {index: run.events(f"server_{index}", "server.ready")[0]["stage"] for index in range(4)}
        first = min(index for index, stage in stage_of.items() if stage == 0)
        os.kill(run.pid_of(f"server:{first}"), signal.SIGKILL)
        assert run.ends(150.0) == 0, run.output
        run.leaves_nothing()
        summary = run.summary()
    assert (summary["stages"], summary["outer_rounds"], summary["exit"]) == (2, 6, "done")
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    assert run.log_dir is not None
    # Four processes: what a step needs of its first stage comes back to it from another one, whatever ties the two.
    processes = 4 if kind == "qwen3" else 1
    run_shoal("replay", str(run.log_dir), f"--processes={processes}")
    home = tmp_path / "home"
    run_shoal("export", str(run.log_dir), "--to", str(home))
    theirs, tokens = transformers.AutoModelForCausalLM.from_pretrained(home), torch.arange(64)[None]
    assert theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=tokens, use_cache=False).logits, open_model(home).whole()(tokens))


def test_a_model_that_is_not_exact_ends_with_exit_code_2(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    with launched(tmp_path, _file(tmp_path, extra={"model_type": "opt", **sizes}, tie=False)) as run:
        assert run.ends(150.0) == 2
        assert "opt of transformers" in run.output
        run.leaves_nothing()


def test_a_host_on_which_a_model_is_not_exact_serves_no_stage_of_it(tmp_path: Path) -> None:
    # With a cut by hand no profiler asks.
    flags = ("--model.family=tests.e2e.inexact_family:InexactFamily", "--model-pipeline.cut=2,2")
    with launched(tmp_path, *SMALL, *flags) as run:
        assert run.ends(150.0) != 0
        assert "the version that is installed here reads what another stage keeps" in run.output
        run.leaves_nothing()


@pytest.mark.usefixtures("forked_for_programs")
def test_a_known_model_in_small_trains_by_its_file_and_speaks_as_transformers_does(
    tmp_path: Path, transformers: ModuleType
) -> None:
    small = train_small(ROOT / "configs/gemma3_270m.yaml", tmp_path, ("--data.holdout-fraction=0.01",))
    assert small.problems == ()
    assert (small.stages, small.replicas) == (2, 4)
    [log_dir] = [str(path) for path in (tmp_path / "logs").glob("gemma3*-2*") if not path.is_symlink()]
    home, wanted = tmp_path / "home", ("--prompt", "The ", "--max-tokens", "20", "--json")
    run_shoal("export", log_dir, "--to", str(home))
    said = json.loads(run_shoal("generate", log_dir, *wanted))
    assert json.loads(run_shoal("generate", str(home), *wanted)) == {**said, "seed": ANY}
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(home)
    ids = torch.tensor([list(b"The ")])
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    assert said["tokens"] == expected[0, 4:].tolist()
