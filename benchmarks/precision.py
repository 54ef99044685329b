#!/usr/bin/env python3
"""How far training in float16 gets beside bfloat16: the same model, data, seeds and steps.

    python benchmarks/precision.py                     3 seeds: about three minutes on two idle cores
    python benchmarks/precision.py --seeds 0 --json precision.json

The small form of a configuration is trained by `run_local.py` over two stages with two replicas each, 300 steps of each
of the two pipelines. In float16 the scale of the loss begins at 65,536, so that the first steps are skipped.

Exit code: 0 if over all seeds the mean held-out loss in float16 is at most 1 % above that in bfloat16, and each run was
whole, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from shoal_lab.small_runs import train_small

ROOT = Path(__file__).parents[1]
ROUNDS, STEPS = 10, 30
PRECISIONS = ("32-true", "bf16-mixed", "fp16-mixed")
MOST_ABOVE = 0.01


@dataclass(frozen=True)
class Trained:
    """One run: held-out losses in nats a token."""

    precision: str
    seed: int
    eval_loss_first: float
    eval_loss_last: float
    steps_skipped: int
    problems: tuple[str, ...]


def train(path: Path, precision: str, seed: int) -> Trained:
    given = (
        f"--data.precision={precision}",
        f"--run.seed={seed}",
        "--model-pipeline.stages=2",
        "--servers.replicas=2",
        f"--diloco.inner-steps={STEPS}",
        f"--diloco.outer-steps={ROUNDS}",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = train_small(path, Path(folder), given)
    return Trained(precision, seed, run.eval_loss_first, run.eval_loss_last, run.steps_skipped, run.problems)


def main() -> int:
    """Train, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "sandbox.yaml")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    options = parser.parse_args()
    console, runs = Console(highlight=False), list[Trained]()
    for seed in options.seeds:
        for precision in PRECISIONS:
            run = train(options.config, precision, seed)
            runs.append(run)
            console.print(
                f"seed {seed} {precision:10} held-out loss {run.eval_loss_first:.4f} -> {run.eval_loss_last:.4f}, "
                f"{run.steps_skipped} steps skipped {' '.join(run.problems)}"
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=2))
    means = {p: statistics.mean(run.eval_loss_last for run in runs if run.precision == p) for p in PRECISIONS}
    above = means["fp16-mixed"] / means["bf16-mixed"] - 1
    console.print(f"float16 is {above:+.2%} of bfloat16 ({', '.join(f'{p} {means[p]:.4f}' for p in PRECISIONS)})")
    return int(above > MOST_ABOVE or any(run.problems for run in runs))


if __name__ == "__main__":
    sys.exit(main())
