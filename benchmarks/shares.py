#!/usr/bin/env python3
"""Two machines of different speed in one run: how much of their summed speed it reaches, and who waits for whom.

    python benchmarks/shares.py                          4:1, a slow one that becomes fast, 16:1: about four minutes
    python benchmarks/shares.py --cases 4 --json shares.json

Real processes, started as `shoal run-local` does: one stage, two replicas. The slower machine is emulated by operations
that last longer in proportion to their samples (`emulation.sample_s`), so it takes no core from the faster one.
First each trains alone, then both together, with nothing set for it. Measured over whole rounds, averaging and
evaluation included, from the third round on; after the slow one has become fast, from the third round after that on.

    speed        samples per second of both together, as a part of the sum of each alone    at least 0.92; 16:1: 0.90
    waited       from the first trainer's last step of a round to the other one's,
                 as a part of the round; the worst one                                       at most 0.10

The first rounds are shown and not counted. Exit code: 0 if all limits hold, else 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BATCH = 64
MICROBATCHES = 4
STEPS = 20
FAST_S = 0.15
"""A batch on the fast machine."""
SETTLED_ROUNDS = 2
"""Rounds at the beginning that are not measured."""
FOLLOWED_AFTER = 3
"""From so many rounds after the one in which a speed has changed on, all is as it should be again."""
MEASURED_ROUNDS = 3
TIMEOUT_S = 300.0
MAX_WAITED = 0.10


@dataclass(frozen=True)
class Round:
    """One outer round: its length, what each slot has trained, and how long the first one waited for the last."""

    number: int
    length_s: float
    samples: Mapping[str, int]
    waited_s: float

    @property
    def total(self) -> int:
        return sum(self.samples.values())


@dataclass(frozen=True)
class Figure:
    """What one case has come to."""

    case: str
    alone: tuple[float, float]
    together: float
    waited: float
    least_speed: float

    @property
    def speed(self) -> float:
        return self.together / sum(self.alone)

    @property
    def holds(self) -> bool:
        return self.speed >= self.least_speed and self.waited <= MAX_WAITED


def times(server: int, factor: float, changes: Sequence[tuple[int, float]] = ()) -> list[str]:
    """Return how slow a server is: `factor` times the fast one, and other times from some of its operations on."""
    sample_s = FAST_S / BATCH
    later = [f"{server}={sample_s * factor:.9f}#{operation}" for operation, factor in changes]
    return [f"{server}={sample_s * factor:.9f}", *later]


def rounds_of(servers: Sequence[Sequence[str]], num_rounds: int, num_steps: int) -> list[Round]:
    """Run a swarm with these servers from beginning to end, and read the rounds in its client's log."""
    with tempfile.TemporaryDirectory(prefix="shoal-shares-") as folder:
        flags = [
            f"--log-dir={folder}",
            "--no-wandb",
            "--run.deterministic=false",
            "--data.seq-len=16",
            "--data.holdout-fraction=0.01",
            "--model.num-layers=1",
            "--model.hidden-size=32",
            "--model.num-heads=2",
            "--model-pipeline.stages=1",
            f"--model-pipeline.microbatches={MICROBATCHES}",
            f"--num-servers={len(servers)}",
            f"--emulation.sample-s={' '.join(chain.from_iterable(servers))}",
            f"--diloco.inner-steps={num_steps}",
            f"--diloco.outer-steps={num_rounds}",
            f"--diloco.batch-size-per-step={BATCH}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "run-local", *flags],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the swarm has failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        [log] = [path for path in Path(folder).glob("*/client_0.log") if not path.parent.is_symlink()]
        events = [json.loads(line) for line in log.read_text().splitlines()]
    shared = {event["round"]: event for event in events if event["event"] == "round.shared"}
    ends_s = {e["round"]: unix_s(e) for e in events if e["event"] == "round.recorded"}
    ends_s[0] = max(unix_s(event) for event in events if event["event"] == "trainer.ready")
    return [
        Round(number, ends_s[number] - ends_s[number - 1], shared[number]["samples"], shared[number]["waited_s"])
        for number in sorted(shared)
    ]


def unix_s(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def samples_per_s(rounds: Sequence[Round]) -> float:
    return sum(each.total for each in rounds) / sum(each.length_s for each in rounds)


def alone(factor: float) -> float:
    """Samples per second of a machine without another one, in rounds about as long as those of both together."""
    num_steps = max(2, round(STEPS * 2 / (1 + 1 / factor) / factor)) if factor > 1 else STEPS
    rounds = rounds_of([times(0, factor)], SETTLED_ROUNDS + MEASURED_ROUNDS, num_steps)
    return samples_per_s([each for each in rounds if each.number > SETTLED_ROUNDS])


def figure(case: str, alone: tuple[float, float], rounds: Sequence[Round], least_speed: float) -> Figure:
    worst = max(each.waited_s / each.length_s for each in rounds)
    return Figure(case, alone, samples_per_s(rounds), worst, least_speed)


def measured(factor: float, fast: float, least_speed: float) -> Figure:
    rounds = rounds_of([times(0, 1.0), times(1, factor)], SETTLED_ROUNDS + MEASURED_ROUNDS + 1, STEPS)
    show(rounds)
    return figure(
        f"{factor:g}:1", (fast, alone(factor)), [each for each in rounds if each.number > SETTLED_ROUNDS], least_speed
    )


def becoming_fast(fast: float) -> Figure:
    """4:1, and in the middle of the fourth round 1:1."""
    changed_in = 4
    operations = (MICROBATCHES + 1) * STEPS  # of a round: each microbatch, and the commit
    slow = times(1, 4.0, ((operations * (changed_in - 1) + operations // 2, 1.0),))
    rounds = rounds_of([times(0, 1.0), slow], changed_in + FOLLOWED_AFTER + MEASURED_ROUNDS - 1, STEPS)
    show(rounds)
    after = [each for each in rounds if each.number >= changed_in + FOLLOWED_AFTER]
    return figure("4:1, then 1:1", (fast, fast), after, 0.92)


def show(rounds: Sequence[Round]) -> None:
    for each in rounds:
        parts = "  ".join(f"{slot}: {num / each.total:5.1%}" for slot, num in sorted(each.samples.items()))
        Console().print(
            f"  round {each.number:2}: {each.total / each.length_s:6.0f} samples/s  shares {parts}  "
            f"waited {each.waited_s / each.length_s:5.1%}",
            highlight=False,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="4,change,16", help="of 4, change, 16")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    fast = alone(1.0)
    cases = {
        "4": lambda: measured(4.0, fast, 0.92),
        "change": lambda: becoming_fast(fast),
        "16": lambda: measured(16.0, fast, 0.90),
    }
    figures = [cases[name]() for name in options.cases.split(",")]
    table = Table("machines", "alone, samples/s", "together", "speed", "waited", "limits hold")
    for each in figures:
        both = " + ".join(f"{value:.0f}" for value in each.alone)
        table.add_row(
            each.case, both, f"{each.together:.0f}", f"{each.speed:.3f}", f"{each.waited:.3f}", str(each.holds)
        )
    Console().print(table)
    if options.json is not None:
        options.json.write_text(
            json.dumps([{**asdict(f), "speed": f.speed, "holds": f.holds} for f in figures], indent=1)
        )
    return 0 if all(each.holds for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
