"""A thousand steps of the sandbox: no role takes more and more memory."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
from tests.e2e.launched import SMALL, Launched, launched, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS_PER_ROUND = 20
HALFWAY, END = 500 // STEPS_PER_ROUND, 1000 // STEPS_PER_ROUND
NUM_SAMPLES = 5
"""Of the memory at each of the two ends, a round apart: what a round takes for a moment is not growth."""
MAX_GROWTH = 0.01
ROLES = (
    "client:0",
    "data_server:0",
    "monitor:0",
    "server:0",
    "server:1",
    "server:2",
    "server:3",
    "trainer:0",
    "trainer:1",
)


def resident_bytes(pid: int) -> int:
    """Of one process, pages that it shares included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def sampled(run: Launched, first_round: int) -> dict[str, float]:
    """Return the memory of each role once that round and a few more have their records."""
    found: dict[str, list[int]] = {role: [] for role in ROLES}
    for round in range(first_round, first_round + NUM_SAMPLES):
        until(lambda round=round: len(run.events("client_0", "round.recorded")) >= round, 400.0, f"round {round}")
        for role, samples in found.items():
            samples.append(resident_bytes(run.pid_of(role)))
    return {role: median(samples) for role, samples in found.items()}


def test_no_role_grows_over_the_second_five_hundred_of_a_thousand_steps(tmp_path: Path) -> None:
    rounds = END + NUM_SAMPLES + 1
    steps = (f"--diloco.inner-steps={STEPS_PER_ROUND}", f"--diloco.outer-steps={rounds}")
    with launched(tmp_path, *SMALL, *steps) as run:
        halfway, end = sampled(run, HALFWAY), sampled(run, END)
        assert run.ends(60.0) == 0, run.output
    growth = {role: end[role] / halfway[role] - 1 for role in ROLES}
    print({role: f"{halfway[role] / 2**20:.1f} MiB {100 * each:+.2f} %" for role, each in growth.items()})
    assert {role: each for role, each in growth.items() if each > MAX_GROWTH} == {}
