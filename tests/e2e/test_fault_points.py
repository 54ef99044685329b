"""Recovery has limits: roles of a real swarm die at each of the chosen points, once, as docs/reliability.md promises.

The program judges by limits of its own, which it stretches by what the machine gives to others at that time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import fault_points
from tests.e2e.launched import ROOT

from shoal.testing.faults.points import POINTS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_swarm_gets_over_a_death_at_each_point_within_the_limits(tmp_path: Path) -> None:
    report = tmp_path / "points.json"
    command = [sys.executable, "benchmarks/fault_points.py", "--repeat=1", "--seed=7", f"--json={report}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert {each["point"] for each in found["points"] if each["deaths"]} == set(POINTS)
    assert found["failures"] == []


def _deaths(point: str, seconds: list[float], whole_s: float | None = None) -> fault_points.Result:
    deaths = [fault_points.Measured("", 1, 0.0, {0: value}, whole_s) for value in seconds]
    return fault_points.Result(point, deaths)


def test_who_takes_longer_than_the_limits_is_named() -> None:
    assert fault_points.late(_deaths("server, any", [0.5] * 20), 0.3, 1.0) == []
    [text] = fault_points.late(_deaths("server, any", [1.0] * 20), 0.3, 1.0)
    assert text == "server, any: median 1.00 s, the limit is 0.90 s"
    [text] = fault_points.late(_deaths("server, any", [0.5] * 15 + [3.0] * 5), 0.3, 1.0)
    assert text == "server, any: p95 3.00 s, the limit is 2.60 s"
    [text] = fault_points.late(_deaths("server, any", [0.5] * 20, whole_s=9.0), 0.3, 1.0)
    assert text == "server, any: whole again after 9.0 s, the limit is 8.0 s"
    assert len(fault_points.late(_deaths("trainer, any", [3.5]), 0.3, 1.0)) == 2


def test_a_machine_that_does_something_else_has_longer() -> None:
    late = _deaths("server, any", [1.5] * 20, whole_s=15.0)
    assert len(fault_points.late(late, 0.3, 1.0)) == 2
    assert fault_points.late(late, 0.3, 4.0) == []
