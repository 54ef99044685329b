"""A thousand steps of the sandbox: no role takes more and more memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from tests.e2e.launched import SMALL, Launched, launched, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS_PER_ROUND = 50
HALFWAY, END = 500 // STEPS_PER_ROUND, 1000 // STEPS_PER_ROUND
NUM_ROUNDS = 4
"""Of which the highest memory is taken at each of the two ends."""
MAX_GROWTH = 0.01
KINDS = {
    "client": ("client:0",),
    "data servers": ("data_server:0",),
    "mirror": ("mirror:0",),
    "monitor": ("monitor:0",),
    "servers": ("server:0", "server:1", "server:2", "server:3"),
    "trainers": ("trainer:0", "trainer:1"),
}
"""Roles that run the same code. A server's own memory goes up and down by 1 %: whenever Python's collector has freed
something (here every 700 steps), the allocator gives the free end of its heap back and takes it again, a bit more or a
bit less. A leak is in all of a kind; the rest evens out in their sum."""


def forget_peak(pid: int) -> None:
    """Begin the highest memory of a process anew (proc(5), `clear_refs`)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """Of one process since its peak was forgotten, pages that it shares included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def peaks(run: Launched, first_round: int) -> dict[str, int]:
    """Return the highest memory of each kind of role from that round's record on, for some rounds."""

    def until_recorded(round: int) -> None:
        until(lambda: len(run.events("client_0", "round.recorded")) >= round, 400.0, f"round {round}")

    until_recorded(first_round)
    for role in chain(*KINDS.values()):
        forget_peak(run.pid_of(role))
    until_recorded(first_round + NUM_ROUNDS)
    return {kind: sum(peak_bytes(run.pid_of(role)) for role in roles) for kind, roles in KINDS.items()}


def test_no_kind_of_role_grows_over_the_second_five_hundred_of_a_thousand_steps(tmp_path: Path) -> None:
    rounds = END + NUM_ROUNDS + 1
    steps = (f"--diloco.inner-steps={STEPS_PER_ROUND}", f"--diloco.outer-steps={rounds}")
    # What grows, grows by the message: a step of few costs half as much.
    steps += ("--diloco.batch-size-per-step=2",)
    with launched(tmp_path, *SMALL, *steps) as run:
        halfway, end = peaks(run, HALFWAY), peaks(run, END)
        assert run.ends(60.0) == 0, run.output
    growth = {kind: end[kind] / halfway[kind] - 1 for kind in KINDS}
    print({kind: f"{halfway[kind] / 2**20:.1f} MiB {100 * each:+.2f} %" for kind, each in growth.items()})
    assert {kind: each for kind, each in growth.items() if each > MAX_GROWTH} == {}
