"""The examples run as their own pages say."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config import load_config
from shoal.config.named_code import naming_options
from shoal.model.registry import load_family
from shoal.model.stage import build_stage

ROOT = Path(__file__).parents[2]
OWN_MODEL = ROOT / "examples" / "own_model"
# What keeps a test short, and says nothing about the example.
SHORT = ["--diloco.inner-steps", "4", "--diloco.outer-steps", "2"]
FALLS_BY = {"own_model": 0.2, "own_data": 0.005}
"""So much in so few steps."""


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


@pytest.mark.slow
@pytest.mark.parametrize("example", ["own_model", "own_data"])
def test_the_command_of_the_page_trains_on_a_swarm(example: str, tmp_path: Path) -> None:
    page = (ROOT / "examples" / example / "README.md").read_text()
    [command] = [line for line in page.splitlines() if "run_local.py" in line]
    assignment, python, *arguments = shlex.split(command)
    assert python == "python"
    name, _, value = assignment.partition("=")
    environment = {**os.environ, name: value, "OMP_NUM_THREADS": "1"}

    def ended(arguments: list[str]) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ended([*arguments, *SHORT, "--log-dir", str(tmp_path)])
    summary = json.loads((tmp_path / example / "summary.json").read_text())
    assert (summary["exit"], summary["outer_rounds"], summary["stages"], summary["replicas"]) == ("done", 2, 2, 4)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert summary["eval_loss_last"] < summary["eval_loss_first"] - FALLS_BY[example]
    named = naming_options(load_config(ROOT / "examples" / example / "config.yaml", env={}))
    assert "bit for bit" in ended(["-m", "shoal", "replay", str(tmp_path / example), *named])
