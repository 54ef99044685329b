#!/usr/bin/env python3
"""How much of their time the devices of a pipeline have nothing to do, with each schedule, beside the theory.

    python benchmarks/schedules.py                                  4 stages, 8 microbatches, 25 ms an operation
    python benchmarks/schedules.py --stages 2 --ms 10,10,20 --json schedules.json

Real processes over Unix sockets run the steps that servers and trainers run, on emulated devices: a forward, the
gradient of an input and the gradients of parameters take fixed times, without using the processor. The bubble is the
share of the time, from the first step's start to the last one's commit, in which a device has not worked; commits and
everything between steps are included. The theory has none of that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.swarm.step_operations import OperationKind, Schedule
from shoal_lab.bench.stage_peer import PipelineSpec
from shoal_lab.bench.stages import open_pipeline, theory
from shoal_lab.emulation.device_pace import DevicePace

_WARM_UP_STEPS = 2


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--ms", default="25,25,25", help="of a forward, an input's gradient, the parameters' gradients")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", default=",".join(Schedule))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    forward_s, input_s, weight_s = (float(word) / 1e3 for word in options.ms.split(","))
    pace = DevicePace(forward_s=forward_s, input_gradient_s=input_s, weight_gradient_s=weight_s)
    table = Table("schedule", "ms a step", "bubble", "theory", *(f"busy, stage {s}" for s in range(options.stages)))
    figures: dict[str, object] = {}
    for schedule in options.schedules.split(","):
        spec = PipelineSpec(
            folder="", schedule=schedule, microbatches=options.microbatches, blocks=options.stages, pace=pace
        )
        with open_pipeline(spec, options.stages) as pipeline:
            pipeline.train(_WARM_UP_STEPS)
            use = pipeline.train(options.steps)
        expected = theory(spec, options.stages)
        shares = [stage.total_s / use.wall_s for stage in use.stages]
        step_ms = use.wall_s / options.steps * 1e3
        table.add_row(
            schedule, f"{step_ms:.1f}", f"{use.bubble:.1%}", f"{expected:.1%}", *(f"{share:.1%}" for share in shares)
        )
        commit_ms = [stage.busy_s[OperationKind.COMMIT] / options.steps * 1e3 for stage in use.stages]
        figures[schedule] = {
            "step_ms": step_ms,
            "bubble": use.bubble,
            "theory": expected,
            "busy": shares,
            "commit_ms": commit_ms,
        }
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
