"""A run that has ended goes on as another one, with three stages and more rounds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.e2e.launched import SMALL, completed, launched

from shoal.testing.verdict import replayed

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

# A mirror of a busy machine gets whole records only if rounds are not too short.
BEGUN = (*SMALL, "--model.num-layers=4", "--diloco.inner-steps=12", "--diloco.outer-steps=3")
BEGUN += ("--param-mirror.every-rounds=1", "--network.bootstrap-timeout-s=120")


def test_a_run_is_forked_with_another_number_of_stages_and_more_rounds(tmp_path: Path) -> None:
    first = completed(tmp_path, *BEGUN)
    before = first.summary()
    log_dir = first.require_log_dir()
    newest = max(path.name for path in (tmp_path / "logs/checkpoints" / log_dir.name).iterdir())
    round = int(newest.removeprefix("round_"))
    last = max(round + 1, 4)
    changed = "--model-pipeline.stages=3", f"--diloco.outer-steps={last}", "--servers.replicas=1"
    kept = {path: path.read_bytes() for path in log_dir.rglob("*") if path.is_file()}
    with launched(tmp_path, "--resume", *changed) as fork:
        assert fork.ends(240.0) == 0, fork.output
        fork.leaves_nothing()
        summary, folder = fork.summary(), fork.require_log_dir()
    [line] = [line for line in fork.output.splitlines() if line.startswith(f"forking run {log_dir.name} ")]
    assert "model_pipeline.stages = 3 instead of 2" in line
    assert f"diloco.outer_steps = {last} instead of 3" in line
    assert line.endswith(f"the fork is run {folder.name}")
    assert (summary["run_id"], summary["stages"], summary["outer_rounds"]) == (folder.name, 3, last)
    assert (summary["duplicates"], summary["missing"], summary["stages_restored"]) == (0, 0, [])
    assert summary["samples_before"] == before["samples"] // 3 * round
    assert math.isclose(summary["eval_losses"][str(round)], before["eval_losses"][str(round)], rel_tol=1e-6)
    rounds = {path.stem: json.loads(path.read_text()) for path in (folder / "rounds").glob("round_*.json")}
    names = [f"round_{number:04d}" for number in (0, *range(round, last + 1))]
    assert sorted(rounds) == names
    origin = json.loads((log_dir / f"rounds/{names[1]}.json").read_text())
    assert rounds[names[1]]["record"]["origin"] == {"run_id": log_dir.name, "record": origin["hash"]}
    said, problems = replayed(folder)
    assert (said.partition(" rounds ")[0], problems) == (str(last - round), [])
    assert {path: path.read_bytes() for path in kept} == kept, "the run that it comes from stays as it was"
