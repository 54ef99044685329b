#!/usr/bin/env python3
"""What 8 and 4 bits cost in accuracy beside 32, on the digits: k-fold, several seeds, paired.

    python benchmarks/lsq.py                                         5 folds, 3 seeds, a small residual network
    python benchmarks/lsq.py --folds 1 --seeds 1                     a glance
    python benchmarks/lsq.py --model resnet18 --json lsq.json        the network of the configuration

Of each fold and seed the same initial weights see the same batches in the same order, once as they are and once with
each number of bits: as configs/resnet18_lsq.yaml says, in two stages, with two replicas of each that are averaged after
every round by the outer step of a swarm. The optimizer is that of the configuration, its rate falls along a cosine.
Shown is the accuracy on the samples of the fold, and its difference to that of 32 bits, pair by pair.

Exit code: 0 if 8 bits are on average within 0.5 points of 32, and 4 bits within 1.5, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shoal.averaging.replica_state import Contribution, OuterState, outer_optimizer, outer_step
from shoal.codec.raw import from_wire
from shoal.config import Config, load_config
from shoal.data.builtin import open_digits
from shoal.data.microbatch import wire_view
from shoal.data.source import Source
from shoal.model.registry import load_family
from shoal.model.resnet import ResNetFamily
from shoal.model.resnet_shape import BlockPlan, ResNetShape
from shoal.model.stage import Family
from shoal.optim.flat import state_buffers
from shoal.optim.outer import pseudo_gradient
from shoal.optim.parts import AveragedParts
from shoal.optim.schedule import LrSchedule
from shoal.pipeline.configured_stage import configured_stage
from shoal.quant.lsq import is_step_size
from shoal.trainer.baseline import PlainLoop

BITS: Final = (32, 8, 4)
MOST_LOST: Final = {8: 0.5, 4: 1.5}
"""Points of accuracy."""
_CONFIG = Path(__file__).parents[1] / "configs" / "resnet18_lsq.yaml"
_REPLICAS = 2
_BLOCKS = [BlockPlan(64, 32, 32, 2, 4), BlockPlan(32, 32, 32, 1, 4), BlockPlan(32, 64, 64, 2, 2)]


class SmallResNet(ResNetFamily):
    """A ResNet with the stem of ResNet-18 and three narrow blocks, which two cores train in seconds."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__(shape)
        self._blocks = _BLOCKS

    def unit_costs(self) -> list[float]:
        return [1.0] * self.num_units


class Swarm:
    """Replicas of all stages, averaged after every round."""

    def __init__(self, config: Config, family: Family) -> None:
        self._config = config
        self.loops = [self._loop(config, family) for _ in range(_REPLICAS)]
        self._parts = [[_parts(stage) for stage in loop.stages] for loop in self.loops]
        self._states = [self._begin(parts) for parts in self._parts[0]]

    def average(self) -> None:
        """One outer step of every stage, of replicas that have trained equally much."""
        for stage, state in enumerate(self._states):
            members = [parts[stage] for parts in self._parts]
            local = [Contribution(*(part.flat() for part in parts)) for parts in members]
            share = 1 / len(members)
            gradients = [pseudo_gradient(state.parameters_N, each.parameters_M) * share for each in local]
            averages = Contribution(
                torch.stack(gradients).sum(0),
                torch.stack([each.floats_F * share for each in local]).sum(0),
                torch.stack([each.integers_I for each in local]).amax(0),
            )
            optimizer = outer_optimizer(self._config.diloco.outer_optim, members[0].parameters.layout)
            self._states[stage] = state = outer_step(optimizer, state, averages)
            for parts in members:
                for part, vector in zip(parts, state.values, strict=True):
                    part.load(vector)

    def smallest_step(self) -> float:
        """The smallest step size of the model; infinite without any."""
        named = [each for stage in self.loops[0].stages for each in stage.named_parameters()]
        return min((step.min().item() for name, step in named if is_step_size(name)), default=math.inf)

    @torch.no_grad()
    def accuracy(self, inputs: Tensor, labels: Tensor) -> float:
        """In percent."""
        hidden = inputs
        for stage in self.loops[0].stages:
            stage.eval()
            hidden = stage(hidden)
            stage.train()
        return (hidden.argmax(dim=1) == labels).double().mean().item() * 100

    @staticmethod
    def _loop(config: Config, family: Family) -> PlainLoop:
        stages = [configured_stage(config, family, stage, "cpu") for stage in range(config.num_stages)]
        inner, norm = config.diloco.inner_optim, config.diloco.max_grad_norm
        return PlainLoop(stages, inner, norm, run_seed=config.run.seed, trainer=0)

    @staticmethod
    def _begin(parts: AveragedParts) -> OuterState:
        parameters, floats, integers = (part.flat() for part in parts)
        return OuterState(parameters, torch.zeros_like(parameters), floats, integers)


def _parts(stage: torch.nn.Module) -> AveragedParts:
    return AveragedParts.of(stage.named_parameters(), state_buffers(stage))


def main() -> int:
    parser = argparse.ArgumentParser(description="what 8 and 4 bits cost in accuracy beside 32")
    parser.add_argument("--folds", type=int, default=5, help="of five that are tried")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--model", choices=("small", "resnet18"), default="small")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console()
    found: list[dict[str, Any]] = []
    for fold in range(arguments.folds):
        for seed in range(arguments.seeds):
            figures = {bits: trained(bits, fold, seed, arguments.epochs, arguments.model) for bits in BITS}
            found.append({"fold": fold, "seed": seed, "bits": figures})
            shown = ", ".join(f"{bits} bits {each['accuracy']:.2f} %" for bits, each in figures.items())
            console.print(f"fold {fold}, seed {seed}: {shown}", highlight=False)
    report = {"model": arguments.model, "epochs": arguments.epochs, "pairs": found, "bits": summed_up(found)}
    console.print(table(report["bits"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(report["bits"][bits]["difference"] >= -most for bits, most in MOST_LOST.items()) else 1


def trained(bits: int, fold: int, seed: int, epochs: int, model: str) -> dict[str, float]:
    """Train one model; return its accuracy on the fold, its last loss and its smallest step size."""
    num_train, inputs, labels = _data(fold)
    base = load_config(_CONFIG, (), {})
    batch = base.diloco.batch_size_per_step // _REPLICAS
    num_steps = num_train // (batch * _REPLICAS) * epochs
    num_rounds = -(-num_steps // base.diloco.inner_steps)
    config = configured(base, bits, seed, num_rounds, model)
    family = (
        load_family(config.model, config.data)
        if model == "resnet18"
        else SmallResNet.from_config(config.model, config.data)
    )
    swarm, schedule = Swarm(config, family), LrSchedule.from_config(config.diloco)
    batches = _batches(num_train, batch, seed)
    losses: list[float] = []
    for step in range(config.diloco.total_steps):
        for loop in swarm.loops:
            chosen = next(batches)
            losses.append(loop.step([(inputs[chosen], labels[chosen])], step, schedule.lr(step))[0])
        if (step + 1) % config.diloco.inner_steps == 0:
            swarm.average()
    accuracy = swarm.accuracy(inputs[num_train:], labels[num_train:])
    loss = statistics.fmean(losses[-2 * config.diloco.inner_steps :])
    return {"accuracy": accuracy, "loss": loss, "smallest_step": swarm.smallest_step()}


def configured(base: Config, bits: int, seed: int, num_rounds: int, model: str) -> Config:
    """The configuration with other bits, of as many rounds."""
    values = base.model_dump()
    values["run"]["seed"] = seed
    values["diloco"] |= {"outer_steps": num_rounds, "lr_schedule": {"type": "cosine", "warmup_steps": 5}}
    values["model_pipeline"]["cut"] = [5, 5] if model == "resnet18" else [3, 2]
    if bits == 32:
        values["quant"] = None
    else:
        for scheme in ("weight_quant", "activation_quant"):
            values["quant"]["base"][scheme]["num_bits"] = bits
    return Config.model_validate(values)


def summed_up(found: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Mean accuracy of each number of bits, and the mean and standard error of the paired differences."""
    sums: dict[int, dict[str, float]] = {}
    for bits in BITS:
        values = [pair["bits"][bits]["accuracy"] for pair in found]
        differences = [value - pair["bits"][32]["accuracy"] for value, pair in zip(values, found, strict=True)]
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        smallest = min(pair["bits"][bits]["smallest_step"] for pair in found)
        sums[bits] = {
            "accuracy": statistics.fmean(values),
            "difference": statistics.fmean(differences),
            "standard_error": error,
            "worst": min(differences),
            "smallest_step": smallest,
        }
    return sums


def table(sums: dict[int, dict[str, float]]) -> Table:
    """For people."""
    shown = Table("bits", "accuracy", "difference to 32", "standard error", "worst pair", "smallest step size")
    for bits, each in sums.items():
        points = [f"{each[name]:+.2f}" for name in ("difference", "standard_error", "worst")]
        shown.add_row(str(bits), f"{each['accuracy']:.2f} %", *points, f"{each['smallest_step']:.2g}")
    return shown


def _data(fold: int) -> tuple[int, Tensor, Tensor]:
    """All samples, those of the fold last; how many come before them, inputs (n, C, H, W) and classes (n)."""
    opened = open_digits(load_config(_CONFIG, (), {}).data)
    (inputs, labels), (more, more_labels) = (_all(each) for each in (opened.train, opened.holdout))
    inputs, labels = torch.cat([inputs, more]), torch.cat([labels, more_labels])
    order = torch.from_numpy(np.random.Generator(np.random.Philox(5)).permutation(len(labels)))
    is_held = torch.arange(len(labels)) % 5 == fold
    sorted_ = torch.cat([order[~is_held], order[is_held]])
    return int((~is_held).sum()), inputs[sorted_], labels[sorted_]


def _all(source: Source) -> tuple[Tensor, Tensor]:
    inputs, labels, _ = source.read(np.arange(source.num_samples, dtype=np.int64))
    return from_wire(wire_view(inputs)), from_wire(wire_view(labels))


def _batches(num_samples: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches, pass after pass, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_samples, generator=generator)
        yield from (part for part in order.split(size) if len(part) == size)


if __name__ == "__main__":
    raise SystemExit(main())
