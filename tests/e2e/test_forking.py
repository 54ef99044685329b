"""A run of which nobody is left goes on as another one, with three stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launched import END_S, PACE, SMALL, Launched, launched, until

from shoal_lab.verdict import replayed

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

# A mirror of a busy machine gets whole records only if rounds are not too short.
BEGUN = (*SMALL, "--model.num-layers=4", f"--emulation.call-s={PACE}", "--diloco.outer-steps=100")
BEGUN += ("--param-mirror.every-rounds=2", "--network.bootstrap-timeout-s=240")


def _whole(run: Launched) -> list[dict[str, Any]]:
    """The mirror of a busy host may get inner states of two replicas of two stages too late."""
    run.require_running()
    written = run.events("mirror_0", "checkpoint.written")
    return [each for each in written if len(list(Path(each["location"]).glob("inner_*"))) == 4]


def test_a_run_is_forked_with_another_number_of_stages_and_of_rounds(tmp_path: Path) -> None:
    with launched(tmp_path, *BEGUN) as lost:
        written = until(lambda: _whole(lost), 480.0, "a checkpoint with all inner states")
        lost.saw("client_0", "round.recorded", within_s=END_S, round=int(written[-1]["round"]) + 1)
        lost.lose_host()
        log_dir = lost.require_log_dir()
        evaluated = {each["base_round"]: each["loss"] for each in lost.events("client_0", "evaluation.done")}
    newest = max(path.name for path in (tmp_path / "logs/checkpoints" / log_dir.name).glob("round_*"))
    round = int(newest.removeprefix("round_"))
    last = round + 2
    changed = "--model-pipeline.stages=3", f"--diloco.outer-steps={last}"
    kept = {path: path.read_bytes() for path in log_dir.rglob("*") if path.is_file()}
    with launched(tmp_path, "--resume", *changed, "--no-wandb") as fork:
        assert fork.ends(240.0) == 0, fork.output
        fork.leaves_nothing()
        summary, folder = fork.summary(), fork.require_log_dir()
    [line] = [line for line in fork.output.splitlines() if line.startswith(f"forking run {log_dir.name} ")]
    assert f"diloco.outer_steps = {last} instead of 100; model_pipeline.stages = 3 instead of 2: the fork" in line
    assert line.endswith(f"the fork is run {folder.name}")
    assert f"the inner optimizers of all servers go on from where they were after round {round}" in fork.output
    assert (summary["run_id"], summary["stages"], summary["outer_rounds"]) == (folder.name, 3, last)
    assert (summary["duplicates"], summary["missing"], summary["stages_restored"]) == (0, 0, [])
    assert math.isclose(summary["eval_losses"][str(round)], evaluated[round], rel_tol=1e-6)
    rounds = {path.stem: json.loads(path.read_text()) for path in (folder / "rounds").glob("round_*.json")}
    names = [f"round_{number:04d}" for number in (0, *range(round, last + 1))]
    assert sorted(rounds) == names
    origin = json.loads((log_dir / f"rounds/{names[1]}.json").read_text())
    assert rounds[names[1]]["record"]["origin"] == {"run_id": log_dir.name, "record": origin["hash"]}
    used = [*origin["record"]["recorded"], *origin["record"]["samples"]]
    assert summary["samples_before"] == sum(stop - start for _, start, stop in used) > 0
    said, problems = replayed(folder)
    assert (said.partition(" rounds ")[0], problems) == ("2", [])
    assert {path: path.read_bytes() for path in kept} == kept, "the run that it comes from stays as it was"
