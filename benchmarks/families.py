#!/usr/bin/env python3
"""Train small models of transformers by `run_local.py`, beside shoal's own gpt and beside a plain transformers loop.

    python benchmarks/families.py                                  about half an hour, on an idle machine
    python benchmarks/families.py --models qwen3 --seeds 1 --json families.json

Each model is cut into two stages with two replicas each, and trained for as many steps as configs/qwen3_tiny.yaml says;
rounds average, without momentum. Of the tied ones the first stage has both ends. Measured, for each seed: the time from
the command to the first committed step; the memory (PSS) of all processes of the run together, the most of what was
seen from round to round; the loss on the held-out part at the end. Then a server of stage 0 is killed in a run of its
own.

The plain loop is transformers' own class with torch's AdamW, over the same number of samples: it takes the batches of
all trainers as one, as data parallelism does. Its initial values and its order of samples are its own, so losses are
compared by their means over the seeds. `shoal replay` has to compute each run again bit for bit.

Exit code: 0 if for every model the first step comes within 8 s, memory is at most that of the gpt and 250 MB, the loss
at most 1 % above the plain loop's, every replay agrees and nothing was lost with the killed server; else 1.
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
from shoal.data.source import Source
from shoal.errors import RunFailed
from shoal.optim.schedule import LrSchedule
from shoal.runtime.process_info import pss_bytes
from shoal_lab.event_log import time_of
from shoal_lab.launched import END_S, START_S, Launched, until
from shoal_lab.observed import Swarm

FIRST_STEP_S, MOST_BESIDE_BYTES, MOST_LOSS = 8.0, 250e6, 1.01
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


@dataclass
class Run:
    """One run of one model.

    Attributes:
        plain_loss: of the plain loop with as many samples; None: the model has none.
    """

    seed: int
    first_step_s: float
    pss_bytes: int
    loss: float
    replayed: bool
    plain_loss: float | None


@dataclass
class Result:
    """All runs of a model.

    Attributes:
        problems: what does not hold, in words.
    """

    model: str
    runs: list[Run] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def first_step_s(self) -> float:
        """Median over the seeds."""
        return statistics.median(run.first_step_s for run in self.runs)

    @property
    def pss_bytes(self) -> float:
        """Median over the seeds."""
        return statistics.median(run.pss_bytes for run in self.runs)

    @property
    def loss(self) -> float:
        """Mean over the seeds."""
        return statistics.mean(run.loss for run in self.runs)

    @property
    def plain_loss(self) -> float | None:
        """Mean over the seeds."""
        found = [run.plain_loss for run in self.runs if run.plain_loss is not None]
        return statistics.mean(found) if found else None


def config_of(model: str, folder: Path) -> Path:
    """Write the configuration of a model's runs, and return where it is."""
    values = yaml.safe_load(CONFIG.read_text())
    values["experiment_prefix"] = f"family_{model}"
    # Momentum pays in long runs; in one of twelve rounds the last ones overshoot.
    values["diloco"]["outer_optim"] = {"sgd_lr": 1.0, "sgd_momentum": 0.0, "sgd_nesterov": False}
    native = {"family": "gpt", "num_layers": 2, "hidden_size": 96, "num_heads": 3}
    values["model"] = native if model == NATIVE else {"family": "hf", "extra": MODELS[model]}
    path = folder / f"{model}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def flags_of(config: Path, seed: int) -> tuple[str, ...]:
    """The flags of every run."""
    return (f"--config-path={config}", f"--run.seed={seed}", "--no-wandb", "--log-level=debug")


def measure(model: str, config: Path, seed: int, directory: Path) -> Run:
    """Train to the end, look at memory meanwhile, and train the plain loop."""
    run = Launched(directory, flags_of(config, seed), ("run_local.py",))
    begun_s = SystemClock().unix_s()
    run.start()
    try:
        firsts = [run.saw(f"trainer_{slot}", "step.committed") for slot in range(NUM_SLOTS)]
        most_bytes = 0
        while run.process.poll() is None:
            most_bytes = max(most_bytes, sum(map(pss_bytes, run.processes())))
            wait_for_round(run)
        if code := run.ends(END_S):
            raise RunFailed(f"the run has ended with exit code {code}:\n{run.output}")
        run.leaves_nothing()
        summary = run.summary()
        replayed = subprocess.run([sys.executable, "-m", "shoal", "replay", str(run.require_log_dir())], check=False)
    finally:
        run.close()
    plain = None if model == NATIVE else plain_loss(load_config(config), seed, summary["samples"])
    first_s = min(map(time_of, firsts)) - begun_s
    return Run(seed, first_s, most_bytes, summary["eval_loss_last"], replayed.returncode == 0, plain)


def wait_for_round(run: Launched) -> None:
    """Wait until one more round is recorded, or the run has ended."""
    before = len(run.events("client_0", "round.recorded"))
    until(
        lambda: run.process.poll() is not None or len(run.events("client_0", "round.recorded")) > before,
        ENDS_S,
        "a round",
    )


def lose_first_stage(config: Path, directory: Path) -> list[str]:
    """Kill a server of stage 0 in the middle of a round; return what does not hold at the end."""
    run = Launched(directory, (*flags_of(config, 0), "--diloco.outer-steps=6"), ("run_local.py",))
    run.start()
    try:
        swarm = Swarm(run, [run], NUM_SLOTS)
        until(swarm.is_training, 2 * START_S, "training")
        run.saw("client_0", "round.recorded", round=2)
        victim = next(server for server in swarm.servers if server.stage == 0)
        os.kill(run.living_pid_of(victim.role), signal.SIGKILL)
        code = run.ends(ENDS_S)
        summary = run.summary()
    finally:
        run.close()
    lost = {name: summary[name] for name in ("duplicates", "missing") if summary[name]}
    ended = (
        [] if code == 0 and summary["outer_rounds"] == 6 else [f"exit code {code}, {summary['outer_rounds']} rounds"]
    )
    return ended + [f"{name}: {number}" for name, number in lost.items()]


# ---- the plain loop


def plain_loss(config: Config, seed: int, num_samples: int) -> float:
    """Train transformers' own class on so many samples; return its loss on the held-out part."""
    torch.manual_seed(seed)
    values = dict(config.model.extra or {})
    kind = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(kind)
    adam, data, schedule = config.diloco.inner_optim, open_source(config), LrSchedule.from_config(config.diloco)
    betas = (adam.adam_betas1, adam.adam_betas2)
    optimizer = AdamW(model.parameters(), lr=adam.adam_lr, betas=betas, weight_decay=adam.adam_weight_decay)
    batch, order = num_samples // config.diloco.total_steps, np.random.default_rng(seed)
    for step in range(config.diloco.total_steps):
        indices = order.integers(data.train.num_samples, size=batch)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        optimizer.zero_grad()
        loss_of(model.train(), data.train, indices, with_routers=True).backward()
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
    if result.plain_loss is not None and result.loss > MOST_LOSS * result.plain_loss:
        result.problems.append(f"the loss is {result.loss / result.plain_loss:.3f} times the plain loop's")
    result.problems += [f"seed {run.seed}: the replay disagrees" for run in result.runs if not run.replayed]


def table(results: Sequence[Result]) -> Table:
    """Return what a reader wants to see."""
    shown = Table(title="Small models through run_local.py")
    for column in ("model", "first step", "PSS", f"beside {NATIVE}", "eval loss", "plain loop", "times", "replays"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        plain = result.plain_loss
        shown.add_row(
            result.model,
            f"{result.first_step_s:.1f} s",
            f"{result.pss_bytes / 1e6:.0f} MB",
            f"{(result.pss_bytes - results[0].pss_bytes) / 1e6:+.0f} MB",
            f"{result.loss:.4f}",
            "" if plain is None else f"{plain:.4f}",
            "" if plain is None else f"{result.loss / plain:.4f}",
            f"{sum(run.replayed for run in result.runs)} of {len(result.runs)}",
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
            config, result = config_of(model, folder), Result(model)
            results.append(result)
            for seed in range(arguments.seeds):
                result.runs.append(measure(model, config, seed, folder / f"{model}-{seed}"))
                console.print(f"{model}: {result.runs[-1]}")
            if model != NATIVE:
                result.problems += lose_first_stage(config, folder / f"{model}-loss")
                judge(result, results[0])
    console.print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2))
    problems = [f"{result.model}: {problem}" for result in results for problem in result.problems]
    for problem in problems:
        console.print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
