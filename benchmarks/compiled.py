#!/usr/bin/env python3
"""Measure what `model_pipeline.compile` saves: training steps of the plain loop, with compiled stages and without.

    python benchmarks/compiled.py                             a GPT and a ResNet-18, 20 steps each way, in turns
    python benchmarks/compiled.py --steps 50 --threads 2

The loop runs the very modules that servers run, one microbatch through both stages and back. Both sides take turns,
step by step. What compiling took depends on what an earlier start has kept (`~/.cache/shoal/compiled`).
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.model.compiled import compile_stage
from shoal.model.registry import load_family
from shoal.model.stage import Family, TensorSpec, build_stage
from shoal.runtime.user_cache import user_cache
from shoal.trainer.baseline import PlainLoop

NUM_STAGES = 2
MICROBATCHES = 4
CASES = {
    "gpt, 4 blocks of width 256, 8 samples of 128 tokens": (
        8,
        {"model": {"family": "gpt", "hidden_size": 256}, "data": {"task_type": "llm", "seq_len": 128}},
    ),
    "resnet18, 16 images of 32 x 32": (
        16,
        {"model": {"family": "resnet18"}, "data": {"task_type": "cv", "img_size": 32, "num_channels": 3}},
    ),
}


def sample(spec: TensorSpec, num: int, below: int) -> Tensor:
    if spec.torch_dtype == torch.int64:
        return torch.randint(below, (num, *spec.shape))
    return torch.randn(num, *spec.shape)


def loop(config: Config, family: Family) -> PlainLoop:
    stages = [build_stage(family, stage, NUM_STAGES, seed=0) for stage in range(NUM_STAGES)]
    return PlainLoop(stages, config.diloco.inner_optim, config.diloco.max_grad_norm, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = SystemClock()
    table = Table("case", "ms a step, as it is", "ms a step, compiled", "ratio", "s to compile")
    for name, (num, sections) in CASES.items():
        config = Config.model_validate(sections)
        family = load_family(config.model, config.data)
        plain, compiled = loop(config, family), loop(config, family)
        begun_s = clock.now_s()
        for stage in compiled.stages:
            compile_stage(stage, {num}, user_cache("compiled"))
        compiling_s = clock.now_s() - begun_s
        torch.manual_seed(0)
        batch = [(sample(family.input_spec(), num, 10), sample(family.label_spec(), num, 10))] * MICROBATCHES
        took_s: dict[PlainLoop, list[float]] = {plain: [], compiled: []}
        for number in range(arguments.steps + 1):
            for each, times_s in took_s.items():
                begun_s = clock.now_s()
                each.step(batch, number, 1e-3)
                times_s.append(clock.now_s() - begun_s)
        # The first step of each is not counted.
        before, after = (1000 * statistics.median(times_s[1:]) for times_s in took_s.values())
        table.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}", f"{compiling_s:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
