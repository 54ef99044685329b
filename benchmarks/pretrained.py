#!/usr/bin/env python3
"""Measure what it takes to begin from weights: a random Llama of 258 M parameters in 13 files, in four stages.

    python benchmarks/pretrained.py
    python benchmarks/pretrained.py --folder DIR --json pretrained.json      keep the model there, or take the one there

Each stage is built and filled as a server does it, all four at the same time, in processes that are forked when torch
and transformers are there. Read from /proc, against the bytes of the stage's parameters: what the process has read, and
its memory (PSS) at most beside what it had before. Weights with another hash have to be refused.

Exit code: 0 if nobody has read more than 1.02 times its parameters, or held more than 1.25 times and 150 MB, else 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shoal.checkpoint.start_weights import StartWeights, fill_start
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import WeightsMissing
from shoal.model.hf.described import with_hf_config
from shoal.model.hf.library import build_whole, model_config
from shoal.model.registry import load_family
from shoal.model.stage import build_stage
from shoal.runtime.process_info import pss_bytes

CUT = (4, 4, 4, 5)
MOST_READ, MOST_HELD, MOST_BESIDE_BYTES = 1.02, 1.25, 150e6
VALUES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": sum(CUT) - 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="what it takes to begin from weights")
    parser.add_argument("--folder", type=Path, help="of the model; is written if it is not there")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "llama"
        if not folder.is_dir():
            torch.manual_seed(1)
            build_whole(model_config(VALUES, {})).save_pretrained(folder, max_shard_size="90MB")
        report = measured(folder)
    show(report)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    held = all(each["held_bytes"] <= MOST_HELD * each["bytes"] + MOST_BESIDE_BYTES for each in report["stages"])
    read = all(each["read_bytes"] <= MOST_READ * each["bytes"] for each in report["stages"])
    return 0 if held and read and report["is_refused"] else 1


def measured(folder: Path) -> dict[str, Any]:
    """Return the figures of all stages."""
    model = {"family": "hf", "name_or_path": str(folder), "pretrained": True}
    config = Config.model_validate({"model": model, "model_pipeline": {"cut": CUT}, "data": {"seq_len": 64}})
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    clock = SystemClock()
    begun_s = clock.now_s()
    weights = StartWeights(config).digests()
    hashing_s = clock.now_s() - begun_s
    config = _with_weights(config, weights)
    forking = multiprocessing.get_context("fork")
    with forking.Pool(len(CUT), maxtasksperchild=1) as pool:
        stages = pool.starmap(filled, [(config, stage) for stage in range(len(CUT))], chunksize=1)
    other = f"{int(weights[-1], 16) ^ 1:032x}"
    with forking.Pool(1) as pool:
        is_refused = pool.apply(_is_refused, (_with_weights(config, (*weights[:-1], other)), len(CUT) - 1))
    return {"hashing_s": round(hashing_s, 2), "is_refused": is_refused, "stages": stages}


def filled(config: Config, stage: int) -> dict[str, float]:
    """Build and fill a stage in this process; return what that took."""
    pid, clock = os.getpid(), SystemClock()
    family = load_family(config.model, config.data)
    before, read_before = pss_bytes(pid), _read_bytes()
    most, is_done = [before], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.01):
            most[0] = max(most[0], pss_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun_s = clock.now_s()
    module = build_stage(family, stage, len(CUT), seed=1, cut=CUT)
    fill_start(config, module)
    took_s = clock.now_s() - begun_s
    is_done.set()
    watcher.join()
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    return {
        "bytes": num_bytes,
        "read_bytes": _read_bytes() - read_before,
        "held_bytes": max(most[0], pss_bytes(pid)) - before,
        "took_s": round(took_s, 2),
    }


def _is_refused(config: Config, stage: int) -> bool:
    family = load_family(config.model, config.data)
    try:
        fill_start(config, build_stage(family, stage, len(CUT), seed=1, cut=CUT))
    except WeightsMissing:
        return True
    return False


def _with_weights(config: Config, weights: tuple[str, ...]) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": weights})})


def _read_bytes() -> int:
    """What this process has read until now, of files and whatever else."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def show(report: dict[str, Any]) -> None:
    """Print the figures."""
    table = Table("stage", "parameters", "read", "held at most", "seconds", title="stages that begin from weights")
    for stage, each in enumerate(report["stages"]):
        size = each["bytes"]
        read, held = each["read_bytes"] / size, each["held_bytes"] / size
        table.add_row(str(stage), f"{size / 1e6:.0f} MB", f"{read:.3f}", f"{held:.2f}", f"{each['took_s']:.2f}")
    console = Console()
    console.print(table)
    console.print(
        f"hashing all units took {report['hashing_s']:.2f} s; another hash is refused: {report['is_refused']}"
    )


if __name__ == "__main__":
    sys.exit(main())
