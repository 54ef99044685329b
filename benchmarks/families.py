#!/usr/bin/env python3
"""Train small models of transformers by `run_local.py`, beside shoal's own gpt and beside a plain transformers loop.

    python benchmarks/families.py                                  about an hour, on an idle machine
    python benchmarks/families.py --models qwen3 --seeds 1 --json families.json

Each model is cut into two stages; of the tied ones the first stage has both ends. It is trained as
configs/qwen3_tiny.yaml says (gpt2 at a lower rate, see `LEARNING_RATES`), and rounds average, without momentum.

    one replica a stage     for each seed to the end: the loss on the held-out part, and whether `shoal replay` computes
                            the run again bit for bit
    two replicas a stage    six rounds: the time from the command to the first committed step, the most memory (PSS) of
                            all processes together after a round, and what is lost with a server of the first stage
                            that is killed

The plain loop is transformers' own class with torch's AdamW. It begins with the same values, which the swarm of one
replica reads as weights from a folder, and takes the same samples in the same order; dropout, where there is any, draws
its own numbers. So what the two losses differ by is the swarm's doing. What it costs that two replicas average after a
round instead of after each step is another question: see docs/learning.md.

Exit code: 0 if for every model the first step comes within 8 s, memory is at most that of the gpt and 250 MB, the loss
is within 1 % of the plain loop's, every replay agrees and nothing was lost with the killed server; else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.optim import AdamW

from shoal.clock import SystemClock
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.data.shuffle import PassOrder
from shoal.data.source import Source
from shoal.errors import RunFailed
from shoal.optim.schedule import LrSchedule
from shoal.runtime.process_info import pss_bytes
from shoal.swarm.sample_ranges import BatchStream
from shoal_lab.event_log import time_of
from shoal_lab.launched import Launched
from shoal_lab.observed import Swarm

FIRST_STEP_S, MOST_BESIDE_BYTES, MOST_DIFFERENCE = 8.0, 250e6, 0.01
NUM_SLOTS = 2
ENDS_S = 600.0
"""Far more than a run takes; it judges nothing."""
NATIVE = "gpt"
CONFIG = Path("configs/qwen3_tiny.yaml")
_SIZES = {"vocab_size": 256, "num_hidden_layers": 2, "hidden_size": 96, "max_position_embeddings": 512}
_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SIZES, **_HEADS, "intermediate_size": 288, "tie_word_embeddings": True},
    "gemma3": {
        "model_type": "gemma3_text",
        **_SIZES,
        **_HEADS,
        "intermediate_size": 288,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_layer": 2, "n_embd": 96, "n_head": 3, "n_positions": 512},
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.1,
        "tie_word_embeddings": False,
    },
}
LEARNING_RATES = {"gpt2": 2e-3}
"""Of those that the configuration's rate is too high for: at 5e-3 the plain loop of gpt2 itself, from the same weights
with the same samples, ends anywhere from 1.66 to 2.08, by the numbers that its dropout draws."""


@dataclass(frozen=True)
class Run:
    """One run of one model to its end, with one replica of each stage.

    Attributes:
        loss: On the held-out part.
        plain_loss: Of the plain loop after as many samples.
    """

    seed: int
    loss: float
    plain_loss: float
    replayed: bool


@dataclass
class Result:
    """All runs of a model.

    Attributes:
        first_step_s: From the command to the first committed step, with two replicas of each stage.
        pss_bytes: Of all processes of that run together.
        runs: None of the native one.
        problems: What does not hold, in words.
    """

    model: str
    first_step_s: float
    pss_bytes: float
    problems: list[str]
    runs: list[Run] = field(default_factory=list)

    @property
    def times_plain(self) -> float | None:
        """The mean loss over the seeds, over that of the plain loop."""
        if not self.runs:
            return None
        return statistics.mean(run.loss for run in self.runs) / statistics.mean(run.plain_loss for run in self.runs)


def transformer(model: str) -> Any:
    """Return a model of transformers with random weights; torch's generator decides which."""
    values = dict(MODELS[model])
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )


def config_of(model: str, folder: Path, weights_seed: int | None = None) -> Path:
    """Write the configuration of a model's run, and the weights that it begins from; return where the former is.

    Args:
        weights_seed: Of these weights and of the run; None: the run draws its own.
    """
    values = yaml.safe_load(CONFIG.read_text())
    values["experiment_prefix"] = f"family_{model}"
    values["diloco"]["outer_optim"] = {"sgd_lr": 1.0, "sgd_momentum": 0.0, "sgd_nesterov": False}
    if model in LEARNING_RATES:
        values["diloco"]["inner_optim"]["adam_lr"] = LEARNING_RATES[model]
    if model == NATIVE:
        values["model"] = {"family": "gpt", "num_layers": 2, "hidden_size": 96, "num_heads": 3}
    elif weights_seed is None:
        values["model"] = {"family": "hf", "extra": MODELS[model]}
    else:
        weights = folder / f"{model}-weights-{weights_seed}"
        torch.manual_seed(weights_seed)
        transformer(model).save_pretrained(weights)
        values["model"] = {"family": "hf", "name_or_path": str(weights), "pretrained": True}
        values["run"] = {"seed": weights_seed}
    path = folder / f"{model}-{'start' if weights_seed is None else weights_seed}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def flags_of(config: Path, num_replicas: int) -> tuple[str, ...]:
    """The flags of a run."""
    return (f"--config-path={config}", f"--servers.replicas={num_replicas}", "--no-wandb", "--log-level=debug")


def train(config: Path, seed: int, directory: Path) -> Run:
    """Train on one replica of each stage to the end, and by the plain loop."""
    run = Launched(directory, flags_of(config, 1), ("run_local.py",))
    run.start()
    try:
        if code := run.ends(ENDS_S):
            raise RunFailed(f"the run has ended with exit code {code}:\n{run.output}")
        run.leaves_nothing()
        loss = run.summary()["eval_loss_last"]
        replayed = subprocess.run([sys.executable, "-m", "shoal", "replay", str(run.require_log_dir())], check=False)
    finally:
        run.close()
    return Run(seed, loss, plain_loss(load_config(config), seed), replayed.returncode == 0)


def start_and_kill(model: str, config: Path, directory: Path) -> Result:
    """Measure a start with two replicas of each stage, and kill a server of stage 0 in the middle of a round."""
    rounds = 6
    run = Launched(directory, (*flags_of(config, NUM_SLOTS), f"--diloco.outer-steps={rounds}"), ("run_local.py",))
    begun_s = SystemClock().unix_s()
    run.start()
    try:
        firsts = [run.saw(f"trainer_{slot}", "step.committed") for slot in range(NUM_SLOTS)]
        most_bytes = 0
        for number in range(1, 4):
            run.saw("client_0", "round.recorded", round=number)
            most_bytes = max(most_bytes, sum(map(pss_bytes, run.processes())))
        victim = next(server for server in Swarm(run, [run], NUM_SLOTS).servers if server.stage == 0)
        os.kill(run.living_pid_of(victim.role), signal.SIGKILL)
        code = run.ends(ENDS_S)
        summary = run.summary()
    finally:
        run.close()
    problems = [f"{name}: {summary[name]}" for name in ("duplicates", "missing") if summary[name]]
    if code or summary["outer_rounds"] != rounds:
        problems.append(f"exit code {code}, {summary['outer_rounds']} of {rounds} rounds")
    return Result(model, min(map(time_of, firsts)) - begun_s, most_bytes, problems)


# ---- the plain loop


def plain_loss(config: Config, seed: int) -> float:
    """Train transformers' own class on the samples of a run of one trainer; return its loss on the held-out part."""
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.name_or_path)
    adam, data, schedule = config.diloco.inner_optim, open_source(config), LrSchedule.from_config(config.diloco)
    betas = (adam.adam_betas1, adam.adam_betas2)
    # As in shoal, biases and norms do not decay.
    decays = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": adam.adam_weight_decay}]
    keeps = [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = AdamW(decays + keeps, lr=adam.adam_lr, betas=betas)
    order, batch = PassOrder.of(data, seed), config.diloco.batch_size_per_step
    batches = BatchStream(data.train.num_samples, batch)
    for step in range(config.diloco.total_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        optimizer.zero_grad()
        loss_of(model.train(), data.train, order.indices((batches.range_of(step),)), with_routers=True).backward()
        if config.diloco.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.diloco.max_grad_norm)
        optimizer.step()
    with torch.no_grad():
        parts = np.array_split(np.arange(data.holdout.num_samples), max(1, data.holdout.num_samples // batch))
        sums = [loss_of(model.eval(), data.holdout, part).item() * len(part) for part in parts]
    return sum(sums) / data.holdout.num_samples


def loss_of(model: Any, source: Source, indices: Any, *, with_routers: bool = False) -> torch.Tensor:
    """Mean cross-entropy of samples that all have as many targets, and the routers' own loss where they have one."""
    inputs, labels = (torch.from_numpy(array).long() for array in source.read(indices).everything)
    coefficient = getattr(model.config, "router_aux_loss_coef", 0.0) if with_routers else 0.0
    found = model(input_ids=inputs, use_cache=False, **({"output_router_logits": True} if coefficient else {}))
    loss = F.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    return loss + coefficient * found.aux_loss if coefficient else loss


# ---- judgement


def judge(result: Result, native: Result) -> None:
    """Note what does not hold."""
    if result.first_step_s > FIRST_STEP_S:
        result.problems.append(f"the first step comes after {result.first_step_s:.1f} s")
    if result.pss_bytes > native.pss_bytes + MOST_BESIDE_BYTES:
        more = (result.pss_bytes - native.pss_bytes) / 1e6
        result.problems.append(f"{more:.0f} MB more than the {NATIVE} has")
    if result.times_plain is not None and abs(result.times_plain - 1) > MOST_DIFFERENCE:
        result.problems.append(f"the loss is {result.times_plain:.3f} times the plain loop's")
    result.problems += [f"seed {run.seed}: the replay disagrees" for run in result.runs if not run.replayed]


def table(results: Sequence[Result]) -> Table:
    """Return what a reader wants to see."""
    shown = Table(title="Small models through run_local.py")
    for column in (
        "model",
        "first step",
        "PSS",
        f"beside {NATIVE}",
        "eval loss, plain loop's by seed",
        "times",
        "replays",
    ):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        shown.add_row(
            result.model,
            f"{result.first_step_s:.1f} s",
            f"{result.pss_bytes / 1e6:.0f} MB",
            f"{(result.pss_bytes - results[0].pss_bytes) / 1e6:+.0f} MB",
            "\n".join(f"{run.loss:.4f}, {run.plain_loss:.4f}" for run in result.runs),
            "" if result.times_plain is None else f"{result.times_plain:.4f}",
            f"{sum(run.replayed for run in result.runs)} of {len(result.runs)}" if result.runs else "",
        )
    return shown


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}, with commas")
    parser.add_argument("--seeds", type=int, default=3, help="of each model (3)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := sorted(set(models) - MODELS.keys()):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    console, results = Console(), []
    with tempfile.TemporaryDirectory(prefix="families-") as temporary:
        folder = Path(temporary)
        for model in (NATIVE, *models):
            results.append(start_and_kill(model, config_of(model, folder), folder / f"{model}-two"))
            console.print(results[-1])
            for seed in range(arguments.seeds if model != NATIVE else 0):
                results[-1].runs.append(train(config_of(model, folder, seed), seed, folder / f"{model}-{seed}"))
                console.print(f"{model}: {results[-1].runs[-1]}")
            judge(results[-1], results[0])
    console.print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    problems = [f"{result.model}: {problem}" for result in results for problem in result.problems]
    for problem in problems:
        console.print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
