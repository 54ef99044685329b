#!/usr/bin/env python3
"""Compare the memory that a server plans with to what its processes take, for models of several kinds.

    python benchmarks/memory.py                             about ten minutes
    python benchmarks/memory.py --models gpt --json memory.json
    python benchmarks/memory.py --models gpt,gpt-bf16 --max-memory 800MB

Each model is cut into two stages with two replicas each, one for each of two trainers, and trained for a few rounds on
the CPU. Planned is what `server.memory` says of the stage, with one open step, by which servers choose it. Measured is
the memory (PSS) of a server and its libp2p daemon: the most that was seen from its first committed step on, looked for
every 50 ms.

With --max-memory each model is one stage, and has as many layers as servers take that may use so much: what they can
lies in files then, of the disk with the temporary folder (set TMPDIR, if that lies in memory). How many times as large
it is as the largest that has all in memory is shown too.

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
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.errors import RunFailed
from shoal.ids import PeerId
from shoal.model.meta import build_units_without_values
from shoal.model.registry import load_family
from shoal.model.stage import stage_units
from shoal.runtime.file_memory import file_room
from shoal.runtime.process_info import tree_usage
from shoal.server.memory import stage_needs
from shoal.swarm.assignment import Files
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

DEEP = ("gpt", "gpt-bf16")
"""Those whose number of layers can be chosen."""


class Plan(NamedTuple):
    """What is planned of one stage: bytes of memory, parameters, and what lies in files."""

    num_bytes: int
    num_parameters: int
    files: Files


@dataclass(frozen=True)
class Stage:
    """What one stage of one model plans with, and the most that one of its servers took, in bytes.

    Attributes:
        times: its parameters over those of the largest model that has all in memory; None: that was not looked for.
    """

    model: str
    stage: int
    planned_bytes: int
    measured_bytes: int
    num_parameters: int
    files: str
    times: float | None = None

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned_bytes / self.measured_bytes


def config_of(model: str, folder: Path) -> Path:
    """Write the configuration of a model's run, and return where it is."""
    flow = {"stages": 2, "microbatches": 2}
    return _written(folder / f"{model}.yaml", model, {"model_pipeline": flow, "servers": {"replicas": 2}})


def largest_of(model: str, folder: Path, servers: Mapping[str, Any]) -> Path:
    """Write the configuration of the run of a model of one stage, with as many layers as these servers take."""
    path, num_layers = folder / f"{model}.yaml", 1
    sections: dict[str, Mapping[str, Any]] = {
        "data": {"seq_len": 32},
        "model_pipeline": {"stages": 1, "microbatches": 4},
        "servers": {"replicas": 2, **servers},
    }

    def fits(num_layers: int) -> bool:
        config = load_config(_written(path, model, {**sections, "model": {"num_layers": num_layers}}))
        [need] = stage_needs(config)
        return need.fits_cut(_server(config, folder))

    while fits(num_layers + 1):
        num_layers += 1
    return _written(path, model, {**sections, "model": {"num_layers": num_layers}})


def _written(path: Path, model: str, sections: Mapping[str, Mapping[str, Any]]) -> Path:
    own = {"experiment_prefix": f"memory_{model}", "diloco": dict(_SHORT)}
    merged = {name: {**MODELS[model].get(name, {}), **sections.get(name, {})} for name in {**MODELS[model], **sections}}
    path.write_text(yaml.safe_dump(own | merged))
    return path


def _server(config: Config, folder: Path) -> Candidate:
    limit, servers = config.servers.max_memory_bytes or 0, config.servers
    disk_bytes, _ = file_room(folder, config.num_servers, servers.max_disk_bytes) if limit else (0, "")
    return Candidate(Hop(peer=PeerId("any"), addresses=()), 0.0, limit, free_disk_bytes=disk_bytes)


def planned(path: Path) -> list[Plan]:
    """Return what is planned of each stage on a server that computes in the host's memory."""
    config = load_config(path)
    family, server = load_family(config.model, config.data), _server(config, path.parent)
    stages = stage_units(family, config.num_stages, config.model_pipeline.cut)
    found = list[Plan]()
    for units, need in zip(stages, stage_needs(config), strict=True):
        files = need.files_of(server)
        num_bytes, _ = need.of(server, need.cap_of(server), files=files)
        parameters = build_units_without_values(family, units, config).parameters()
        found.append(Plan(num_bytes, sum(parameter.numel() for parameter in parameters), files))
    return found


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
    shown = Table(title="Memory of a server", caption="ratio: planned over measured")
    for column in ("model", "stage", "parameters", "times", "in files", "planned", "measured", "ratio"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for each in found:
        sizes = (f"{size / 1e6:.0f} MB" for size in (each.planned_bytes, each.measured_bytes))
        times = "" if each.times is None else f"{each.times:.2f}"
        parameters = f"{each.num_parameters / 1e6:.1f} M"
        shown.add_row(each.model, str(each.stage), parameters, times, each.files, *sizes, f"{each.ratio:.3f}")
    return shown


def stages_of(model: str, folder: Path, limit: str | None) -> list[Stage]:
    """Train a model, and return what its stages took; with a limit the largest that servers take with files."""
    times = None
    if limit is None:
        config = config_of(model, folder)
    else:
        [plain] = planned(largest_of(model, folder, {"max_memory_bytes": limit, "max_disk_bytes": 0}))
        config = largest_of(model, folder, {"max_memory_bytes": limit})
        times = planned(config)[0].num_parameters / plain.num_parameters
    took = measured(config, folder / model)
    return [
        Stage(model, stage, plan.num_bytes, took[stage], plan.num_parameters, plan.files.name.lower(), times)
        for stage, plan in enumerate(planned(config))
    ]


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}, with commas")
    parser.add_argument("--max-memory", help="what each server may use (800MB): find the largest models for it")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    models = arguments.models.split(",")
    if unknown := sorted(set(models) - MODELS.keys()):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if arguments.max_memory and (others := sorted(set(models) - set(DEEP))):
        parser.error(f"with --max-memory not: {', '.join(others)}; {', '.join(DEEP)} have layers to add")
    console, found = Console(), list[Stage]()
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        for model in models:
            of_model = stages_of(model, Path(temporary), arguments.max_memory)
            found += of_model
            console.print(table(of_model))
    console.print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2))
    return int(any(abs(each.ratio - 1) > MOST_APART for each in found))


if __name__ == "__main__":
    sys.exit(main())
