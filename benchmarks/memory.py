#!/usr/bin/env python3
"""Compare the memory that a server plans with to what its processes take, for models of several kinds.

    python benchmarks/memory.py                             about ten minutes
    python benchmarks/memory.py --models gpt --json memory.json

Each model is cut into two stages with two replicas each, one for each of two trainers, and trained for a few rounds on
the CPU. Planned is what `server.memory` says of the stage, with one open step, by which servers choose it. Measured is
the memory (PSS) of a server and its libp2p daemon: the most that was seen from its first committed step on, looked for
every 50 ms.

Exit code: 0 if the plan is within 10 % of the largest replica of every stage, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from shoal.config.load import load_config
from shoal.errors import RunFailed
from shoal.ids import PeerId
from shoal.runtime.process_info import tree_usage
from shoal.server.memory import stage_needs
from shoal.swarm.view import Candidate
from shoal.wire.messages.base import Hop
from shoal_lab.launched import END_S, START_S, Launched, until
from shoal_lab.observed import Swarm

MOST_APART = 0.1
NUM_SLOTS = 2
LOOK_S = 0.05
_SHORT: Mapping[str, Any] = {
    "inner_steps": 2,
    "outer_steps": 4,
    "batch_size_per_step": 4,
}
_TEXT: Mapping[str, Any] = {"task_type": "llm", "seq_len": 128, "holdout_fraction": 0.005}
_GPT: Mapping[str, Any] = {"family": "gpt", "num_layers": 8, "hidden_size": 512, "num_heads": 8}
_QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"model": _GPT, "data": _TEXT},
    "gpt-bf16": {"model": _GPT, "data": {**_TEXT, "precision": "bf16-mixed"}},
    "qwen3": {"model": {"family": "hf", "extra": {**_QWEN3, "tie_word_embeddings": False}}, "data": _TEXT},
    "qwen3-tied": {"model": {"family": "hf", "extra": {**_QWEN3, "tie_word_embeddings": True}}, "data": _TEXT},
    "resnet18": {
        "model": {"family": "resnet18"},
        "data": {"task_type": "cv", "dataset_name": "digits", "num_channels": 1, "img_size": 32},
    },
}


@dataclass(frozen=True)
class Stage:
    """What one stage of one model plans with, and the most that one of its servers took, in bytes."""

    model: str
    stage: int
    planned_bytes: int
    measured_bytes: int

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned_bytes / self.measured_bytes


def config_of(model: str, folder: Path) -> Path:
    """Write the configuration of a model's run, and return where it is."""
    values = {
        "experiment_prefix": f"memory_{model}",
        **MODELS[model],
        "diloco": _SHORT,
        "model_pipeline": {"stages": 2, "microbatches": 2},
        "servers": {"replicas": 2},
    }
    path = folder / f"{model}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def planned(config: Path) -> list[int]:
    """Return the bytes that each stage needs of a server that computes in the host's memory."""
    nobody = Candidate(Hop(peer=PeerId("nobody"), addresses=()), 0.0)
    return [need.of(nobody, None)[0] for need in stage_needs(load_config(config))]


def measured(config: Path, directory: Path) -> dict[int, int]:
    """Train, and return the most that a server of each stage took."""
    run = Launched(directory, (f"--config-path={config}", "--no-wandb", "--log-level=debug"), ("run_local.py",))
    run.start()
    try:
        swarm, pause = Swarm(run, [run], NUM_SLOTS), threading.Event()
        until(
            lambda: swarm.client.log_dir is not None and all(map(swarm.steps, range(NUM_SLOTS))), 2 * START_S, "steps"
        )
        stages = {run.pid_of(server.role): server.stage for server in swarm.servers}
        most = dict.fromkeys(stages.values(), 0)
        while run.process.poll() is None:
            for pid, stage in stages.items():
                most[stage] = max(most[stage], tree_usage(pid).pss_bytes)
            pause.wait(LOOK_S)
        if code := run.ends(END_S):
            raise RunFailed(f"the run has ended with exit code {code}:\n{run.output}")
    finally:
        run.close()
    return most


def table(found: Sequence[Stage]) -> Table:
    """Return what a reader wants to see."""
    shown = Table(title="Memory of a server", caption="planned over measured")
    for column in ("model", "stage", "planned", "measured", "ratio"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for each in found:
        sizes = (f"{size / 1e6:.0f} MB" for size in (each.planned_bytes, each.measured_bytes))
        shown.add_row(each.model, str(each.stage), *sizes, f"{each.ratio:.3f}")
    return shown


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}, with commas")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := sorted(set(models) - MODELS.keys()):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    console, found = Console(), list[Stage]()
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        for model in models:
            config = config_of(model, Path(temporary))
            took = measured(config, Path(temporary) / model)
            found += [Stage(model, stage, plan, took[stage]) for stage, plan in enumerate(planned(config))]
            console.print(table([each for each in found if each.model == model]))
    console.print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2))
    return int(any(abs(each.ratio - 1) > MOST_APART for each in found))


if __name__ == "__main__":
    sys.exit(main())
