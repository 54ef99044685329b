"""`shoal chaos` on real processes: faults of all kinds from a seed, a true verdict, and nothing left after Ctrl-C."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ROOT, START_S, until

from shoal.runtime.process_info import with_environment
from shoal_lab.chaos.plan import plan_faults

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_SMALL = ("--model.hidden-size=48", "--data.seq-len=64", "--diloco.batch-size-per-step=4", "--diloco.inner-steps=8")


def _start(directory: Path, tag: str, *flags: str) -> subprocess.Popen[str]:
    name, _, value = tag.partition("=")
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "chaos", *flags, *_SMALL, f"--log-dir={directory}"],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _tag() -> str:
    return f"TAG_OF_TEST_CHAOS={secrets.token_hex(8)}"


def test_a_swarm_gets_over_faults_from_a_seed_and_the_verdict_says_so(tmp_path: Path) -> None:
    report, kinds = tmp_path / "report.json", "server,trainer,data-server,client,fork-server"
    times = ("--seed=4", "--for=24s", "--every=6s")
    process = _start(tmp_path, _tag(), *times, f"--kinds={kinds}", f"--json={report}", "--emulated-device=30ms")
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    found = json.loads(report.read_text())
    planned = plan_faults(4, 24.0, 6.0, kinds.split(","))
    done = found["runs"]["chaos"]["faults"]
    assert [fault["kind"] for fault in done] == [fault.kind for fault in planned]
    assert output.splitlines()[-1].startswith(f"chaos holds: seed 4: exit code 130, {_text(found, 'hashes')}")
    assert found["runs"]["chaos"]["samples_per_s"] > 0
    [log] = tmp_path.glob("chaos-*/chaos/logs/sandbox-*/chaos.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["number"] for line in lines if line["event"] == "chaos.fault"] == [0, 1, 2, 3]


def _text(report: dict, check: str) -> str:
    return next(each["text"] for each in report["runs"]["chaos"]["findings"] if each["check"] == check)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_in_the_middle_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    tag = _tag()
    process = _start(tmp_path, tag, "--for=10m", "--every=5s", "--kinds=server")
    try:
        until(lambda: list(tmp_path.glob("**/chaos.jsonl")), 2 * START_S, "the first fault")
        process.send_signal(number)
        output, _ = process.communicate(timeout=END_S)
        assert process.returncode == (130 if number == signal.SIGINT else -number), output
        until(lambda: not with_environment(tag), END_S, "the end of the swarm")
    finally:
        process.kill()
        process.communicate()
