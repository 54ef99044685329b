"""Recovery has limits: roles of a real swarm die at each of the chosen points, as docs/reliability.md promises.

The program judges by limits of its own, multiples of what the same run and machine show: a loop of the machine, a usual
step. None of them is so tight that what else the machine does decides (`--lenient`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import fault_points, recovery_limits

POINTS = ("server@commit", "server@fetch", "trainer@prepared")
"""Of a step, a round and a transfer, of each role: those that are left out are like their neighbours."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("forked_for_programs")
def test_a_swarm_gets_over_a_death_at_each_point_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "points.json"
    options = [f"--points={','.join(POINTS)}", "--repeat=1", "--lenient", "--seed=7", f"--json={report}"]
    monkeypatch.setattr(sys, "argv", ["fault_points.py", *options])
    # Steps take as long as with the sandbox's model, and the cores are left to other tests meanwhile.
    fewer = ("--model-pipeline.microbatches=2", f"--emulation.call-s={2 * fault_points.CALL_S}")
    small = ("--model.hidden-size=48", "--data.seq-len=64", "--diloco.batch-size-per-step=4", *fewer)
    monkeypatch.setattr(fault_points, "FLAGS", (*fault_points.FLAGS, *small))
    assert fault_points.main() == 0, capsys.readouterr()
    found = json.loads(report.read_text())
    assert {each["point"] for each in found["points"] if each["deaths"]} == set(POINTS)
    assert found["failures"] == []


def _deaths(
    point: str, seconds: list[float], whole_s: float | None = None, gap_s: float | None = None
) -> recovery_limits.Result:
    deaths = [recovery_limits.Measured("", 1, 0.0, {0: value}, whole_s, gap_s) for value in seconds]
    return recovery_limits.Result(point, deaths)


def test_who_takes_longer_than_the_limits_is_named() -> None:
    assert recovery_limits.late(_deaths("server, any", [0.5] * 20), 0.3, 1.0) == []
    [text] = recovery_limits.late(_deaths("server, any", [1.0] * 20), 0.3, 1.0)
    assert text == "server, any: median 1.00 s, the limit is 0.90 s"
    [text] = recovery_limits.late(_deaths("server, any", [0.5] * 15 + [3.0] * 5), 0.3, 1.0)
    assert text == "server, any: p95 3.00 s, the limit is 2.60 s"
    [text] = recovery_limits.late(_deaths("server, any", [0.5] * 20, whole_s=9.0), 0.3, 1.0)
    assert text == "server, any: whole again: p95 9.00 s, the limit is 8.00 s"
    assert len(recovery_limits.late(_deaths("trainer, any", [3.5]), 0.3, 1.0)) == 2


def test_a_machine_that_does_something_else_has_longer() -> None:
    late = _deaths("server, any", [1.5] * 20, whole_s=15.0)
    assert len(recovery_limits.late(late, 0.3, 1.0)) == 2
    assert recovery_limits.late(late, 0.3, 4.0) == []


def test_a_transfer_that_holds_up_the_steps_of_others_is_named_and_a_busy_machine_has_longer_here_too() -> None:
    slow = _deaths("server@fetch", [0.5], gap_s=0.51)
    [text] = recovery_limits.held_up(slow, 0.38, 1.0)
    assert text == "server@fetch: a step of the others 0.51 s longer, the limit is 0.38 s"
    assert recovery_limits.held_up(slow, 0.38, 1.5) == []
    assert recovery_limits.held_up(slow, 0.38, 1.0, lenient=True) == []
    assert recovery_limits.held_up(_deaths("server@fetch", [0.5]), 0.38, 1.0) == []


@pytest.mark.parametrize(("role", "usual_s"), [("server", 0.4), ("trainer", 0.4), ("data_server", 1.2)])
def test_load_that_nobody_has_seen_is_no_verdict_and_five_seconds_more_are(role: str, usual_s: float) -> None:
    under_load = _deaths(f"{role}, any", [3 * usual_s] * 6 + [3.9])
    assert recovery_limits.late(under_load, 0.4, 1.0, lenient=True) == []
    broken = _deaths(f"{role}, any", [usual_s + 5.0] * 7)
    assert len(recovery_limits.late(broken, 0.4, 1.0, lenient=True)) == 2
