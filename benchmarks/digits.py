#!/usr/bin/env python3
"""What a swarm reaches beside a plain loop, in accuracy: ResNet-18 on the digits, by cross-validation.

    python benchmarks/digits.py                                   5 folds, 3 seeds: about two hours on two idle cores
    python benchmarks/digits.py --folds 0 --seeds 0 --json digits.json

For each fold and seed the model of configs/resnet18_split.yaml is trained twice from the same initial values, and
measured on the images of that fold, which neither has seen: by `run_local.py` on a swarm of two stages with two
replicas each, and by the plain loop of `shoal trainer --run-locally` over as many samples. The two figures of a fold
and seed are a pair.

Exit code: 0 if the swarm names 97 % of the images rightly, over all folds and seeds, and the mean difference of the
pairs is at most one point, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from shoal.checkpoint.loading import load_model
from shoal.cli.baseline import train_baseline
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.inference.evaluation import held_out_accuracy
from shoal.trainer.baseline import PlainLoop
from shoal_lab.launched import launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole

ROOT = Path(__file__).parents[1]
FILE = ROOT / "configs" / "resnet18_split.yaml"
NUM_FOLDS, NUM_SLOTS = 5, 2
LEAST_ACCURACY, MOST_DIFFERENCE = 0.97, 0.01
ENDS_S = 3600.0
"""Far more than a run takes; it judges nothing."""


@dataclass(frozen=True)
class Pair:
    """The share of a fold's images that each names rightly."""

    fold: int
    seed: int
    swarm: float
    baseline: float


def flags(fold: int, seed: int, rounds: int) -> tuple[str, ...]:
    """What is said besides the file: rounds average, with little momentum, since they are few."""
    return (
        f"--data.holdout-fraction={1 / NUM_FOLDS}",
        f"--data.holdout-fold={fold}",
        f"--run.seed={seed}",
        "--deterministic",
        "--device=cpu",
        "--diloco.inner-optim.adam-lr=1e-3",
        "--diloco.lr-schedule.type=cosine",
        "--diloco.inner-steps=20",
        f"--diloco.outer-steps={rounds}",
        "--diloco.outer-optim.sgd-lr=0.9",
        "--diloco.outer-optim.sgd-momentum=0.3",
        "--diloco.batch-size-per-step=32",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="the accuracy of a swarm beside a plain loop's")
    parser.add_argument("--folds", default=",".join(map(str, range(NUM_FOLDS))), help="with commas")
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--rounds", type=int, default=6, help="of 20 steps of each of the two trainers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    console.print("| fold | seed | swarm, % | plain loop, % |\n|---|---|---|---|")
    pairs: list[Pair] = []
    for seed in map(int, arguments.seeds.split(",")):
        for fold in map(int, arguments.folds.split(",")):
            swarm = trained_by_swarm(flags(fold, seed, arguments.rounds))
            plain = trained_by_loop(flags(fold, seed, NUM_SLOTS * arguments.rounds))
            pairs.append(Pair(fold, seed, swarm, plain))
            console.print(f"| {fold} | {seed} | {100 * swarm:.2f} | {100 * plain:.2f} |")
    mean = statistics.mean(pair.swarm for pair in pairs)
    difference = statistics.mean(pair.swarm - pair.baseline for pair in pairs)
    spread = statistics.stdev(pair.swarm - pair.baseline for pair in pairs) if len(pairs) > 1 else 0.0
    console.print(
        f"swarm {100 * mean:.2f} %; beside the plain loop {100 * difference:+.2f} points, from pair to pair "
        f"{100 * spread:.2f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(pair) for pair in pairs], indent=2))
    return 0 if mean >= LEAST_ACCURACY and abs(difference) <= MOST_DIFFERENCE else 1


def trained_by_swarm(said: tuple[str, ...]) -> float:
    """Train on a swarm, check the run, and measure its model."""
    with tempfile.TemporaryDirectory() as temporary:
        with launched(Path(temporary), f"--config-path={FILE}", "--no-wandb", *said) as run:
            if run.ends(ENDS_S) != 0:
                raise SystemExit(run.output)
            run.leaves_nothing()
            require_whole(Swarm(run, [run], NUM_SLOTS))
            folder = run.require_log_dir()
        model = load_model(folder)
        return held_out_accuracy(model, open_source(load_config(folder / "config.yaml", (), {})).holdout)


def trained_by_loop(said: tuple[str, ...]) -> float:
    """Train the plain loop, and measure its model."""
    config: Config = load_config(FILE, said, {})
    loop: PlainLoop = train_baseline(config, lambda _: None)
    stages = [stage.eval() for stage in loop.stages]

    def model(x: Tensor) -> Tensor:
        for stage in stages:
            x = stage(x)
        return x

    return held_out_accuracy(model, open_source(config).holdout)


if __name__ == "__main__":
    sys.exit(main())
