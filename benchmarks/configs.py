#!/usr/bin/env python3
"""Train every configuration of a folder in small (--tiny), one after the other, and print a table of the runs.

    python benchmarks/configs.py                                  those of configs/: the table of docs/configurations.md
    python benchmarks/configs.py --convert ../aether/configs      files of aether, each translated before
    python benchmarks/configs.py --only resnet18,mlp --json runs.json

Each run has to end by itself with a lower loss than at first (of a GAN: a finite one), equal hashes on all servers of a
stage, and every sample trained once. A file of aether that `shoal config convert` refuses is shown with its reasons.

Exit code: 0 if every file that is trained is as it has to be, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from shoal.config.distqat import converted_yaml
from shoal.errors import ConfigError
from shoal_lab.small_runs import SmallRun, train_small

HEAD = "| config | task | model | stages | replicas | steps | loss before | after | seconds |"


def main() -> int:
    parser = argparse.ArgumentParser(description="train every configuration of a folder in small")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1] / "configs")
    parser.add_argument("--convert", action="store_true", help="they are aether's: translate them first")
    parser.add_argument("--only", help="names with commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    paths = sorted(arguments.folder.glob("*.yaml"))
    if arguments.only:
        paths = [path for path in paths if path.stem in arguments.only.split(",")]
    if not paths:
        parser.error(f"{arguments.folder} holds no such configuration")
    console.print(HEAD)
    console.print("|---|---|---|---|---|---|---|---|---|")
    runs: dict[str, SmallRun] = {}
    refused: dict[str, str] = {}
    for path in paths:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            if arguments.convert:
                try:
                    (directory / path.name).write_text(converted_yaml(path))
                except ConfigError as error:
                    refused[path.stem] = str(error)
                    continue
                path = directory / path.name
            runs[path.stem] = run = train_small(path, directory)
        console.print(_row(path.stem, run))
    for name, reasons in refused.items():
        console.print(f"\n{name} is refused:\n{reasons}")
    for name, run in runs.items():
        for problem in run.problems:
            console.print(f"\n{name}: {problem}")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=2))
    return 1 if any(run.problems for run in runs.values()) else 0


def _row(name: str, run: SmallRun) -> str:
    counts = f"{run.stages} | {run.replicas} | {run.steps}"
    losses = f"{run.eval_loss_first:.3f} | {run.eval_loss_last:.3f}"
    return f"| `{name}` | {run.task} | {run.model} | {counts} | {losses} | {run.seconds_total:.0f} |"


if __name__ == "__main__":
    sys.exit(main())
