"""`test_failover.py`, which users run against their own configuration and at their own address."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.e2e.launched import ROOT


def _run(*flags: str, within_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "test_failover.py", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False)


def test_a_configuration_with_one_stage_is_refused_before_anything_starts() -> None:
    done = _run("--config-path=configs/resnet18.yaml", within_s=60)
    assert done.returncode == 2
    assert "configs/resnet18.yaml: a head and a tail need model_pipeline.stages = 2 or more" in done.stderr
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_servers_of_a_configuration_of_ones_own_are_killed_one_by_one_at_a_given_address(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    values = yaml.safe_load((ROOT / "configs/sandbox.yaml").read_text())
    values["data"]["seq_len"], values["model"]["hidden_size"] = 64, 48
    own.write_text(yaml.safe_dump(values))
    done = _run(f"--config-path={own}", "--public-ip=127.0.0.1", within_s=860)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("PASS")
