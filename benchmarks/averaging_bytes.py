#!/usr/bin/env python3
"""What averaging costs on the wire, by codec: bytes of real swarms, as their summaries count them.

    python benchmarks/averaging_bytes.py                            all codecs, 2 and 4 replicas: about eight minutes
    python benchmarks/averaging_bytes.py --codecs int8,2bit --replicas 2 --json bytes.json

Real processes, started as `shoal run-local` does: one stage of 10.4 million parameters, two rounds. Servers of one host
would read each other's memory; `SHOAL_PORTABLE=1` has them send as between hosts. Counted is all that servers send for
averages, with its framing.

    payload      bytes of one replica's pseudo-gradient as float32, over those of its payload in the record
    framing      what is sent beside payloads, as a part of all that is sent: frames, buffers
    against DDP  bytes of bfloat16 gradients that H steps would send in a ring, over those of one round

Exit code: 0 if every codec saves as much as it should, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.averaging.journal import read_records

ROUNDS = 2
H = 30
"""Steps in a round that the comparison with DDP assumes: as in the papers."""
MAX_FRAMING = 0.03
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Case:
    """A codec, how it is asked for, and how many times fewer bytes its payload has than float32."""

    name: str
    flags: tuple[str, ...]
    least_saving: float


CASES = (
    Case("none", ("--diloco.averaging-compression=none",), 1.0),
    Case("bf16", ("--diloco.averaging-compression=bf16",), 2.0),
    Case("int8", ("--diloco.averaging-compression=int8",), 3.95),
    Case("int4", ("--diloco.averaging-compression=int4",), 7.8),
    Case("int4_e3m0", ("--diloco.averaging-compression=int4_e3m0",), 7.8),
    Case("2bit", ("--diloco.averaging-compression=2bit",), 15.0),
    Case("sparse 6.25 %", ("--diloco.averaging-compression=sparse", "--diloco.averaging-density=0.0625"), 64.0),
    Case("sparse 1.56 %", ("--diloco.averaging-compression=sparse", "--diloco.averaging-density=0.015625"), 200.0),
)


@dataclass(frozen=True)
class Figure:
    """What one codec has come to with so many replicas; bytes are those of one replica and round."""

    codec: str
    replicas: int
    parameters: int
    payload_bytes: float
    sent_bytes: float
    least_saving: float

    @property
    def saving(self) -> float:
        return 4 * self.parameters / self.payload_bytes

    @property
    def framing(self) -> float:
        return 1 - self.payload_bytes * (self.replicas - 1) / self.sent_bytes

    @property
    def against_ddp(self) -> float:
        ddp_bytes = H * 2 * (self.replicas - 1) / self.replicas * 2 * self.parameters
        return ddp_bytes / self.sent_bytes

    @property
    def is_gathered(self) -> bool:
        return self.least_saving > 2

    @property
    def holds(self) -> bool:
        return not self.is_gathered or (self.saving >= self.least_saving and self.framing <= MAX_FRAMING)


def measured(case: Case, replicas: int) -> Figure:
    with tempfile.TemporaryDirectory(prefix="shoal-bytes-") as folder:
        flags = [
            "--config-path=configs/mlp.yaml",
            f"--log-dir={folder}",
            "--no-wandb",
            "--model.num-layers=4",
            "--model.hidden-size=1600",
            "--model-pipeline.stages=1",
            "--model-pipeline.microbatches=1",
            f"--num-servers={replicas}",
            "--diloco.inner-steps=2",
            f"--diloco.outer-steps={ROUNDS}",
            "--diloco.batch-size-per-step=8",
            *case.flags,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "run-local", *flags],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=os.environ | {"SHOAL_PORTABLE": "1"},
        )
        if done.returncode:
            raise SystemExit(f"the swarm has failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        [run] = [path.parent for path in Path(folder).glob("*/summary.json") if not path.parent.is_symlink()]
        summary = json.loads((run / "summary.json").read_text())
        payloads = [each for record, _ in read_records(run) for outcome in record.stages for each in outcome.payloads]
    sent_bytes = summary["bytes_sent"]["pseudo_gradients"] / (replicas * ROUNDS)
    parameters = 64 * 1600 + 1600 + 4 * (1600 * 1600 + 1600) + 1600 * 10 + 10
    payload_bytes = [each.num_bytes for each in payloads if each is not None]
    # A ring has no payloads: each replica sends 2 (n - 1) / n of the vector, in the form in which it travels.
    each_bytes = sum(payload_bytes) / len(payload_bytes) if payload_bytes else 4 * parameters / case.least_saving
    return Figure(case.name, replicas, parameters, each_bytes, sent_bytes, case.least_saving)


def shown(figures: Sequence[Figure]) -> Table:
    table = Table("codec", "n", "payload", "fewer", "least", "sent", "framing", "DDP")
    for each in figures:
        limits = (f"{each.least_saving:g}", f"{each.framing:.2%}") if each.is_gathered else ("", "")
        table.add_row(
            each.codec,
            str(each.replicas),
            f"{each.payload_bytes:,.0f}",
            f"{each.saving:.2f}",
            limits[0],
            f"{each.sent_bytes:,.0f}",
            limits[1],
            f"{each.against_ddp:,.0f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codecs", help="names, divided by commas; all if left out")
    parser.add_argument("--replicas", default="2,4", help="how many there are of the stage")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    options = parser.parse_args()
    names = options.codecs.split(",") if options.codecs else [case.name for case in CASES]
    chosen = [case for case in CASES if case.name in names]
    figures = [measured(case, int(replicas)) for replicas in options.replicas.split(",") for case in chosen]
    Console().print(shown(figures))
    if options.json is not None:
        rows = [asdict(f) | {"saving": f.saving, "framing": f.framing, "against_ddp": f.against_ddp} for f in figures]
        options.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(each.holds for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
