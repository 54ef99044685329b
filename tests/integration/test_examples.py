"""The example of a family of one's own; what the pages of examples say, tests/e2e/test_tasks.py runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config import load_config
from shoal.model.registry import load_family
from shoal.model.stage import build_stage

ROOT = Path(__file__).parents[2]
OWN_MODEL = ROOT / "examples" / "own_model"
# What keeps a test short, and says nothing about the example.
SHORT = ["--diloco.inner-steps", "4", "--diloco.outer-steps", "2"]


def test_the_family_of_ones_own_can_be_cut_as_often_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    config = load_config(OWN_MODEL / "config.yaml", env={})
    family = load_family(config.model, config.data)
    assert len(family.unit_costs()) == family.num_units
    for num_stages in range(1, family.num_units + 1):
        stages = [build_stage(family, stage, num_stages, seed=0) for stage in range(num_stages)]
        assert all(one.output_spec == following.input_spec for one, following in pairwise(stages))


def test_the_family_of_ones_own_learns_in_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    assert main(["trainer", "--run-locally", "--config-path", str(OWN_MODEL / "config.yaml"), *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split("eval loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.2
