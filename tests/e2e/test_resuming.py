"""Every process of a run is killed at once; another start goes on from a checkpoint, to the end of the run.

What it does when the newest checkpoint is damaged is looked at in test_resume_points.py.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.buckets import KEY, SECRET, bucket
from tests.e2e.launched import END_S, FEW, PACE, SMALL, Launched, launched, until
from tests.e2e.test_steering import shoal

from shoal.report.learning import read_learning

pytestmark = pytest.mark.timeout(600)

NUM_ROUNDS = 14
"""The mirror of a busy machine has two checkpoints long before."""
BEGUN = (
    *SMALL,
    # A mirror of a busy machine gets whole records only if rounds are not too short.
    f"--emulation.call-s={PACE}",
    f"--diloco.outer-steps={NUM_ROUNDS}",
    "--param-mirror.every-rounds=2",
    "--param-mirror.keep-last=3",
    "--network.bootstrap-timeout-s=120",
)


def _written(run: Launched) -> list[dict[str, Any]]:
    return run.events("mirror_0", "checkpoint.written")


def _rounds(log_dir: Path) -> dict[int, dict[str, Any]]:
    contents = [json.loads(path.read_text()) for path in (log_dir / "rounds").glob("round_*.json")]
    return {content["record"]["round"]: content for content in contents if "record" in content}


def _on_inner_optimizers(checkpoint: Path) -> str:
    """What is said of them, two servers of each of two stages: a mirror of a busy host may have got some too late."""
    num_stages = len({path.name.split("_")[1] for path in checkpoint.glob("inner_*_*.safetensors")})
    if not num_stages:
        return "the inner optimizers of 4 servers begin anew (the checkpoint has nothing for them)"
    of = "all" if num_stages == 2 else "2 of 4"
    return f"the inner optimizers of {of} servers go on from where they were after round"


@pytest.mark.slow
def test_a_run_that_is_killed_whole_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    with launched(tmp_path, *BEGUN) as lost:
        lost.saw("client_0", "round.recorded", within_s=480.0, round=1)
        kept = until(lambda: _written(lost)[1:], 240.0, "two checkpoints")
        lost.saw("client_0", "round.recorded", within_s=END_S, round=int(kept[-1]["round"]) + 1)
        lost.lose_host()
        log_dir = lost.require_log_dir()
        # What it has left here is named.
        assert f" of run {log_dir.name}: " in shoal(lost, "ps")
        assert f" of run {log_dir.name}: " in shoal(lost, "clean")
        evaluated = {each["base_round"]: each["loss"] for each in lost.events("client_0", "evaluation.done")}
    newest = max((tmp_path / "logs/checkpoints" / log_dir.name).glob("round_*"))
    good, told = int(newest.name.removeprefix("round_")), _on_inner_optimizers(newest)
    with launched(tmp_path, "--resume", "--no-wandb") as resumed:
        assert resumed.ends(240.0) == 0, resumed.output
        resumed.leaves_nothing()
        assert f"resuming run {log_dir.name} from its checkpoint of round {good}" in resumed.output
        assert told in resumed.output
        assert resumed.require_log_dir() == log_dir
        summary = resumed.summary()
    assert (summary["exit"], summary["outer_rounds"]) == ("done", NUM_ROUNDS)
    assert (summary["duplicates"], summary["missing"], summary["stages_restored"]) == (0, 0, [])
    assert summary["run_id"] == log_dir.name
    records = _rounds(log_dir)
    assert sorted(records) == list(range(1, NUM_ROUNDS + 1))
    for round in range(2, NUM_ROUNDS + 1):
        assert records[round]["record"]["previous"] == records[round - 1]["hash"]
    again = {each["base_round"]: each["loss"] for each in resumed.events("client_0", "evaluation.done")}
    assert math.isclose(again[good], evaluated[good], rel_tol=1e-6), "it is evaluated before anything is trained"
    assert _written(resumed)[-1]["round"] == NUM_ROUNDS, "of the last round there always is one"
    learning = read_learning(log_dir)
    assert list(learning.rounds) == list(range(1, NUM_ROUNDS + 1)), "its picture has both starts of the run"
    assert [loss for _, loss in learning.held_out] == [
        summary["eval_losses"][str(round)] for round in (0, *learning.rounds)
    ]
    assert (learning.rounds[good], "resumed from a checkpoint") in learning.incidents
    assert "resumed from a checkpoint" in (log_dir / "curves.svg").read_text()


@pytest.mark.slow
def test_a_run_that_ctrl_c_has_stopped_goes_on_with_what_its_inner_optimizers_knew(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW, "--param-mirror.every-rounds=0") as stopped:
        stopped.saw("client_0", "round.recorded", within_s=480.0, round=5)
        stopped.interrupt()
        assert stopped.ends(240.0) == 130, stopped.output
        stopped.leaves_nothing()
        last = stopped.summary()["outer_rounds"]
    assert f"--resume {tmp_path}/logs/checkpoints/" in stopped.output
    with launched(tmp_path, "--resume", "--no-wandb") as resumed:
        resumed.saw("client_0", "round.recorded", within_s=480.0, round=last + 1)
        resumed.interrupt()
        assert resumed.ends(240.0) == 130, resumed.output
        resumed.leaves_nothing()
        summary = resumed.summary()
    assert f"from its checkpoint of round {last}" in resumed.output
    assert f"the inner optimizers of all servers go on from where they were after round {last}" in resumed.output
    assert (summary["duplicates"], summary["missing"]) == (0, 0)


@pytest.mark.slow
def test_a_run_whose_host_is_gone_goes_on_elsewhere_from_an_object_store(tmp_path: Path) -> None:
    with bucket() as empty:
        options = {"environment": {**empty.environment, "HOME": str(tmp_path)}}
        with launched(tmp_path / "lost", *BEGUN, f"--checkpoint-dir={empty.location}", **options) as lost:
            until(lambda: _written(lost)[1:], 480.0, "two checkpoints")
            lost.lose_host()
            lost_dir = lost.require_log_dir()
        elsewhere = tmp_path / "elsewhere/logs" / lost_dir.name
        elsewhere.mkdir(parents=True)
        shutil.copy2(lost_dir / "swarm.key", elsewhere)
        with launched(tmp_path / "elsewhere", f"--resume={empty.location}", "--no-wandb", **options) as resumed:
            assert resumed.ends(240.0) == 0, resumed.output
            resumed.leaves_nothing()
            summary = resumed.summary()
        assert f"resuming run {elsewhere.name} from its checkpoint of round" in resumed.output
        assert (summary["run_id"], summary["exit"], summary["outer_rounds"]) == (elsewhere.name, "done", NUM_ROUNDS)
        assert (summary["duplicates"], summary["missing"], summary["stages_restored"]) == (0, 0, [])
        assert _written(resumed)[-1]["round"] == NUM_ROUNDS, "it goes on writing to the store"
    for run in (lost, resumed):
        written = [
            run.output,
            *(path.read_text(errors="replace") for path in run.log_root.rglob("*") if path.is_file()),
        ]
        assert not any(KEY in text or SECRET in text for text in written)
