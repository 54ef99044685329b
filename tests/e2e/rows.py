"""Rows of text that are samples, and a run over them that loses a process, and then its whole host, and goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.launched import END_S, Launched, launched, until

from shoal.averaging.journal import read_steps
from shoal.wire.messages.base import SampleRange

ROW_BYTES = 12
SEED, SLOTS, STEPS = 5, 2, 5


def row(number: int) -> str:
    """As many bytes as a sample, with the line's end behind it: the samples are the rows."""
    return f"row {number:0{ROW_BYTES - 5}d}"


def trained_over_losses(directory: Path, data: dict[str, Any], diloco: dict[str, Any], victim: str) -> Launched:
    """Train a small model on rows: kill a process in the second round, then the host after two checkpoints, resume.

    Args:
        victim: The role whose process is killed: "trainer:1".

    Returns:
        The run that was resumed, to its end; nothing is missing in it.
    """
    values = {
        "wandb": False,
        "run": {"deterministic": True, "seed": SEED},
        "data": {"seq_len": ROW_BYTES, **data},
        "model": {"num_layers": 2, "hidden_size": 8, "num_heads": 1},
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "diloco": {"inner_steps": STEPS, **diloco},
        "servers": {"replicas": SLOTS},
        "param_mirror": {"every_rounds": 2},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    with launched(directory, f"--config-path={path}") as lost:
        lost.saw("client_0", "round.recorded", round=1)
        os.kill(lost.pid_of(victim), signal.SIGKILL)
        if victim.startswith("trainer"):
            lost.saw("client_0", "trainer.replaced", within_s=END_S)
        kept = until(lambda: lost.events("mirror_0", "checkpoint.written")[1:], END_S, "two checkpoints")
        lost.saw("client_0", "round.recorded", within_s=END_S, round=int(kept[-1]["round"]) + 1)
        lost.lose_host()
    with launched(directory, "--resume=latest", "--no-wandb") as resumed:
        assert resumed.ends(240.0) == 0, resumed.output
        resumed.leaves_nothing()
        summary = resumed.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("done", 0, 0)
    return resumed


def dealt(log_dir: Path, rounds: int) -> Iterator[SampleRange]:
    """Yield what was trained on, in the order in which it is dealt: by round, step of the round, and slot."""
    for round in range(1, rounds + 1):
        entries = {line.entry.key[:3]: line.entry for line in read_steps(log_dir, round) if line.stage == 0}
        numbers = {slot: sorted(key for key in entries if key[0] == slot) for slot in range(SLOTS)}
        assert [len(keys) for keys in numbers.values()] == [STEPS] * SLOTS
        for step in range(STEPS):
            for slot in range(SLOTS):
                yield from entries[numbers[slot][step]].samples
