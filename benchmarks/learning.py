#!/usr/bin/env python3
"""What the forms of pseudo-gradients cost in bytes and in learning: the tables of docs/learning.md.

    python benchmarks/learning.py bytes                            all forms, 2 and 4 replicas: about ten minutes
    python benchmarks/learning.py loss                             20 rounds, seeds 0, 1, 2: about an hour
    python benchmarks/learning.py loss --forms none,2bit --rounds 80 --seeds 0 --json loss.json

Real swarms, started as `shoal run-local` does, of one stage. Servers of one host would read each other's memory;
`SHOAL_PORTABLE=1` has them send as between hosts.

bytes: 10.4 million parameters, two rounds. Counted is all that servers send for averages, by their summaries.

    payload      bytes that one replica's pseudo-gradient is encoded as
    fewer        as float32 it has so many times as many
    framing      what is sent beside payloads, as a part of all that is sent
    DDP          bytes of the bfloat16 gradients of 30 steps in a ring, over those of their rounds

loss: four replicas of the sandbox's model, 30 steps a round. Compared are losses on held-out text after the last round,
by seed. Sparse forms have no outer momentum and an outer rate of 1: what is sent late is their momentum.

With "/3" a round averages a third of the parameters (`diloco.fragments`), after 10 steps instead of 30. With "+5" what
travels is cut five steps before a round ends (`diloco.overlap_steps`). DDP is the plain loop of `shoal trainer
--run-locally` over as many samples: it averages gradients in every step, of all four batches.

Exit code: 0 if every form saves as much, and learns as well, as it should, and after 80 rounds the swarm without a
codec has learnt as much as DDP; else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.averaging.journal import read_records
from shoal.cli.baseline import train_baseline
from shoal.config.load import load_config
from shoal.trainer.baseline_run import BaselineReport

BYTES_ROUNDS = 2
H = 30
"""Steps in a round."""
REPLICAS, BATCH = 4, 8
"""loss: of the stage, and samples in a step of one."""
MAX_FRAMING = 0.03
LONG_ROUNDS = 80
"""After so many the swarm without a codec has to have learnt as much as DDP."""
TIMEOUT_S = 1800.0
NESTEROV = ("--diloco.outer-optim.sgd-lr=0.7", "--diloco.outer-optim.sgd-momentum=0.9")
MEAN = (
    "--diloco.outer-optim.sgd-lr=1",
    "--diloco.outer-optim.sgd-momentum=0",
    "--diloco.outer-optim.sgd-nesterov=false",
)


@dataclass(frozen=True)
class Form:
    """How pseudo-gradients travel.

    Attributes:
        least_saving: How many times fewer bytes than float32 a payload has at least.
        most_gap: How much higher the loss may be than without a codec, as a part of that; None: it is only shown.
        fragments: Of the parameters, one of which each round averages.
        is_swarm: Whether a swarm trains it, or else the plain loop.
    """

    name: str
    flags: tuple[str, ...]
    outer: tuple[str, ...]
    least_saving: float
    most_gap: float | None
    fragments: int
    is_swarm: bool = True

    @property
    def is_gathered(self) -> bool:
        return self.least_saving / self.fragments > 2


def form(name: str, outer: tuple[str, ...], least_saving: float, most_gap: float | None, density: str = "") -> Form:
    cut, _, overlap = name.partition(" ")[0].partition("+")
    codec, _, fragments = cut.partition("/")
    flags = [f"--diloco.averaging-compression={codec}", f"--diloco.fragments={fragments or 1}"]
    flags += [f"--diloco.overlap-steps={overlap}"] if overlap else []
    flags += [f"--diloco.averaging-density={density}"] if density else []
    return Form(name, tuple(flags), outer, least_saving, most_gap, int(fragments or 1))


DDP = Form("DDP", (), (), 1, None, 1, is_swarm=False)
FORMS = (
    form("none", NESTEROV, 1, 0.0),
    form("bf16", NESTEROV, 2, 0.003),
    form("int8", NESTEROV, 3.95, 0.003),
    form("int4", NESTEROV, 7.8, 0.003),
    form("int4_e3m0", NESTEROV, 7.8, 0.003),
    form("2bit", NESTEROV, 15, 0.01),
    form("sparse 6.25 %", MEAN, 64, 0.015, "0.0625"),
    form("sparse 1.56 %", MEAN, 200, None, "0.015625"),
    form("none/3", NESTEROV, 3, None),
    form("int4/3", NESTEROV, 3 * 7.8, None),
    form("2bit/3", NESTEROV, 3 * 15, None),
    form("int4+5", NESTEROV, 7.8, 0.003),
    DDP,
)


def run(folder: str, *flags: str) -> tuple[Path, dict[str, Any]]:
    """Run a swarm from beginning to end; returns its folder and summary."""
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run-local", f"--log-dir={folder}", "--no-wandb", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"SHOAL_PORTABLE": "1"},
    )
    if done.returncode:
        raise SystemExit(f"the swarm has failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    [found] = [path.parent for path in Path(folder).glob("*/summary.json") if not path.parent.is_symlink()]
    return found, json.loads((found / "summary.json").read_text())


# ---- bytes


@dataclass(frozen=True)
class Bytes:
    """What one form has come to with so many replicas; bytes are those of one replica and round."""

    form: Form
    replicas: int
    parameters: int
    payload: float
    sent: float

    @property
    def saving(self) -> float:
        return 4 * self.parameters / self.payload

    @property
    def framing(self) -> float:
        return 1 - self.payload * (self.replicas - 1) / self.sent

    @property
    def against_ddp(self) -> float:
        of_rounds = self.form.fragments * self.sent
        return H * 2 * (self.replicas - 1) / self.replicas * 2 * self.parameters / of_rounds

    @property
    def holds(self) -> bool:
        is_small = self.saving >= self.form.least_saving and self.framing <= MAX_FRAMING
        return not self.form.is_gathered or is_small

    @property
    def row(self) -> dict[str, Any]:
        return {
            "form": self.form.name,
            "replicas": self.replicas,
            "payload_bytes": round(self.payload),
            "saving": self.saving,
            "sent_bytes": round(self.sent),
            "framing": self.framing if self.form.is_gathered else None,
            "against_ddp": self.against_ddp,
        }


def bytes_of(each: Form, replicas: int) -> Bytes:
    with tempfile.TemporaryDirectory(prefix="shoal-learning-") as folder:
        found, summary = run(
            folder,
            "--config-path=configs/mlp.yaml",
            "--model.num-layers=4",
            "--model.hidden-size=1600",
            "--model-pipeline.stages=1",
            "--model-pipeline.microbatches=1",
            f"--num-servers={replicas}",
            "--diloco.inner-steps=2",
            f"--diloco.outer-steps={BYTES_ROUNDS}",
            "--diloco.batch-size-per-step=8",
            *each.flags,
        )
        payloads = [one for record, _ in read_records(found) for outcome in record.stages for one in outcome.payloads]
    sent = summary["bytes_sent"]["pseudo_gradients"] / (replicas * BYTES_ROUNDS)
    parameters = 64 * 1600 + 1600 + 4 * (1600 * 1600 + 1600) + 1600 * 10 + 10
    sizes = [one.num_bytes for one in payloads if one is not None]
    # A ring has no payloads: the vector travels in parts, as its codec casts it.
    return Bytes(
        each, replicas, parameters, statistics.mean(sizes) if sizes else 4 * parameters / each.least_saving, sent
    )


def table_of_bytes(figures: Sequence[Bytes]) -> Table:
    table = Table("form", "replicas", "payload", "fewer", "at least", "sent", "framing", "DDP")
    for each in figures:
        least, framing = (f"{each.form.least_saving:g}", f"{each.framing:.2%}") if each.form.is_gathered else ("", "")
        cells = (f"{each.payload:,.0f}", f"{each.saving:.2f}", least, f"{each.sent:,.0f}", framing)
        table.add_row(each.form.name, str(each.replicas), *cells, f"{each.against_ddp:,.0f}")
    return table


# ---- loss


@dataclass(frozen=True)
class Loss:
    """The loss of one form after the last round by seed, and how much higher it is than without a codec."""

    form: Form
    losses: tuple[float, ...]
    dense: tuple[float, ...]

    @property
    def gap(self) -> float:
        return statistics.mean(self.losses) / statistics.mean(self.dense) - 1

    @property
    def holds(self) -> bool:
        return self.form.most_gap is None or self.gap <= self.form.most_gap

    @property
    def row(self) -> dict[str, Any]:
        return {"form": self.form.name, "losses": self.losses, "gap": self.gap, "most_gap": self.form.most_gap}


def loss_of(each: Form, rounds: int, seed: int) -> float:
    flags = (f"--run.seed={seed}", "--run.deterministic=true", "--data.seq-len=64", "--data.holdout-fraction=0.01")
    flags += ("--model-pipeline.stages=1", "--model-pipeline.microbatches=1")
    loss = loss_of_swarm(each, rounds, flags) if each.is_swarm else loss_of_loop(rounds, flags)
    Console().print(f"  {each.name}, seed {seed}: {loss:.4f}", highlight=False)
    return loss


def loss_of_swarm(each: Form, rounds: int, flags: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="shoal-learning-") as folder:
        _, summary = run(
            folder,
            f"--num-servers={REPLICAS}",
            f"--diloco.inner-steps={H // each.fragments}",
            f"--diloco.outer-steps={rounds * each.fragments}",
            f"--diloco.batch-size-per-step={BATCH}",
            *flags,
            *each.outer,
            *each.flags,
        )
    return float(summary["eval_loss_last"])


def loss_of_loop(rounds: int, flags: Sequence[str]) -> float:
    said = (f"--diloco.inner-steps={H}", f"--diloco.outer-steps={rounds}", "--device=cpu")
    batch = f"--diloco.batch-size-per-step={REPLICAS * BATCH}"
    reports: list[BaselineReport] = []
    train_baseline(load_config(None, (*flags, *said, batch), {}), reports.append)
    return [report.eval_loss for report in reports if report.eval_loss is not None][-1]


def losses(forms: Sequence[Form], rounds: int, seeds: Sequence[int]) -> list[Loss]:
    dense = tuple(loss_of(FORMS[0], rounds, seed) for seed in seeds)
    found = [Loss(FORMS[0], dense, dense)]
    for each in forms:
        if each is not FORMS[0]:
            found.append(Loss(each, tuple(loss_of(each, rounds, seed) for seed in seeds), dense))
    return found


def table_of_losses(figures: Sequence[Loss]) -> Table:
    table = Table("form", "loss by seed", "higher by", "at most")
    for each in figures:
        most = "" if each.form.most_gap is None else f"{each.form.most_gap:.1%}"
        table.add_row(each.form.name, "  ".join(f"{loss:.4f}" for loss in each.losses), f"{each.gap:+.2%}", most)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("bytes", "loss"))
    parser.add_argument("--forms", help="names, divided by commas; all if left out")
    parser.add_argument("--replicas", default="2,4", help="bytes: how many there are of the stage")
    parser.add_argument("--rounds", type=int, default=20, help="loss: outer rounds")
    parser.add_argument("--seeds", default="0,1,2", help="loss: of model and data")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    names = options.forms.split(",") if options.forms else [each.name for each in FORMS]
    if unknown := set(names) - {each.name for each in FORMS}:
        parser.error(f"no such form: {', '.join(sorted(unknown))}; there are {', '.join(each.name for each in FORMS)}")
    forms = [each for each in FORMS if each.name in names and (each.is_swarm or options.what == "loss")]
    figures: Sequence[Bytes] | Sequence[Loss]
    if options.what == "bytes":
        figures = [bytes_of(each, int(replicas)) for replicas in options.replicas.split(",") for each in forms]
        table = table_of_bytes(figures)
    else:
        figures = losses(forms, options.rounds, [int(seed) for seed in options.seeds.split(",")])
        table = table_of_losses(figures)
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([each.row for each in figures], indent=1))
    is_behind_ddp = any(isinstance(each, Loss) and each.form is DDP and each.gap < 0 for each in figures)
    if is_behind_ddp and options.rounds >= LONG_ROUNDS:
        return 1
    return 0 if all(each.holds for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
