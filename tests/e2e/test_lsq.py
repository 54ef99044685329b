"""The shipped configuration with quantisation through the real command: trained, replayed, taken home; or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.e2e.launched import END_S, completed, launched, run_shoal

import shoal
from shoal.quant.lsq import is_step_size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_TINY = (
    "--config-path=configs/resnet18_lsq.yaml",
    "--deterministic",
    "--no-wandb",
    "--diloco.inner-steps=2",
    "--diloco.outer-steps=2",
    "--diloco.batch-size-per-step=4",
    "--data.holdout-fraction=0.01",
)


def test_a_quantised_run_of_two_stages_is_replayed_bit_for_bit_and_exported_as_integers(tmp_path: Path) -> None:
    run = completed(tmp_path, *_TINY, within_s=400.0)
    summary = run.summary()
    assert (summary["stages"], summary["replicas"], summary["trainers"], summary["outer_rounds"]) == (2, 4, 2, 2)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    folder = str(run.require_log_dir())
    run_shoal("replay", folder)
    model = shoal.load_model(folder)
    steps = [parameter for name, parameter in model.named_parameters() if is_step_size(name)]
    # The stem, the head, two convolutions of each of eight blocks, and three shortcuts: a weight and an input each.
    assert len(steps) == 2 * (1 + 1 + 8 * 2 + 3)
    assert all((step > 0).all() for step in steps)
    to = tmp_path / "integers"
    run_shoal("export", folder, "--to", str(to), "--format", "integers")
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(shoal.load_model(to)(images), model(images))
    losses = [json.loads(run_shoal("evaluate", each, "--json"))["eval_loss"] for each in (folder, str(to))]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(summary["eval_loss_last"], abs=1e-3)


def test_a_rule_that_changes_nothing_is_the_users_error(tmp_path: Path) -> None:
    rule = "{rules: [{name_patterns: [stem.convv], weight_quant: off}]}"
    with launched(tmp_path, *_TINY, f"--quant={rule}") as run:
        assert run.ends(END_S) == 2, run.output
        run.leaves_nothing()
    assert "quant.rules[0] (name_patterns: ['stem.convv']): matches no module" in run.output
    assert "stem.conv" in run.output.split("is called like")[1]
