"""A run is killed whole at a chosen point: in a checkpoint's writing, before a commit, after the first swap."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import resume_points
from benchmarks.resume_points import LATER, Resumed, late

from shoal_lab.faults.whole_kills import WholeKill

POINTS = ("mirror@rename", "server@swapped+cut")
"""The rest is for a person: each takes half a minute."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_for_programs")
def test_a_run_goes_on_wherever_it_is_killed_with_the_rounds_of_one_that_nobody_has_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "resumed.json"
    options = [f"--points={','.join(POINTS)}", "--lenient", "--seed=0", f"--json={report}"]
    monkeypatch.setattr(sys, "argv", ["resume_points.py", *options])
    # Half the steps, each of which takes twice as long: a round takes a second for the mirror here too.
    fewer = ("--diloco.inner-steps=6", "--emulation.call-s=0.04", "--model-pipeline.microbatches=2")
    fewer += ("--data.holdout-fraction=0.005",)
    monkeypatch.setattr(resume_points, "INNER_STEPS", 6)
    # How soon it goes on, the benchmark judges.
    monkeypatch.setattr(resume_points, "late", lambda *_, **__: list[str]())
    monkeypatch.setattr(resume_points, "FLAGS", (*resume_points.FLAGS, *fewer))
    assert resume_points.main() == 0, capsys.readouterr()
    found = json.loads(report.read_text())
    assert len(found["points"]) == len(POINTS)
    assert found["failures"] == []


def test_a_first_step_that_comes_too_late_is_named() -> None:
    def resumed(resumed_s: float | None) -> Resumed:
        return Resumed(WholeKill("mirror@file", "mirror:0@file#7", 1, ""), 6, 8.0, resumed_s, [], [])

    assert late(resumed(9.9), 1.0, lenient=False) == []
    [text] = late(resumed(10.1), 1.0, lenient=False)
    assert text == "the first step came 2.1 s later than a fresh start's, the limit is 2.0 s"
    assert late(resumed(12.0), 3.0, lenient=False) == []
    assert late(resumed(8.0 + LATER.least_s), 1.0, lenient=True) == []
    assert late(resumed(None), 1.0, lenient=True) == ["no step was committed"]
