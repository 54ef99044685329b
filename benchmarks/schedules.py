#!/usr/bin/env python3
"""How much of a step the devices of a pipeline have nothing to do, with each schedule, beside the theory.

    python benchmarks/schedules.py                                  4 stages, 8 microbatches, 50 ms a forward
    python benchmarks/schedules.py --stages 2 --call-ms 20 --json schedules.json

Whole runs, started as a user starts them, on emulated devices (`emulation.call_s`): a forward takes `--call-ms`, the
gradient of an input and the gradients of parameters half as long each, without using the processor. The bubble is the
share of a step in which a device does none of these; commits and everything between steps are part of it. The theory
has none of that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from shoal.swarm.step_operations import Schedule
from shoal_lab.bench.bubble import bubble_of
from shoal_lab.emulation.device_pace import emulated_pace
from shoal_lab.event_log import time_of
from shoal_lab.launched import launched

_WARM_UP_STEPS = 2
_ENDS_S = 300.0
"""Far more than a run takes; it judges nothing."""


def step_s(schedule: Schedule, options: argparse.Namespace) -> float:
    """Return how long a step lasts, from commit to commit: the mean over a round without its first steps."""
    flags = (
        "--no-wandb",
        "--log-level=debug",
        "--param-mirror.enable=false",
        "--servers.replicas=1",
        "--model.hidden-size=32",
        "--model.num-heads=2",
        f"--model.num-layers={options.stages}",
        "--data.seq-len=16",
        f"--model-pipeline.stages={options.stages}",
        f"--model-pipeline.schedule={schedule.value}",
        f"--model-pipeline.microbatches={options.microbatches}",
        f"--diloco.batch-size-per-step={2 * options.microbatches}",
        f"--diloco.inner-steps={_WARM_UP_STEPS + options.steps}",
        "--diloco.outer-steps=1",
        f"--emulation.call-s={options.call_ms / 1e3}",
    )
    with tempfile.TemporaryDirectory(prefix="shoal-schedules-") as folder, launched(Path(folder), *flags) as run:
        if run.ends(_ENDS_S):
            raise SystemExit(f"the run has failed:\n{run.output}")
        ends_s = [time_of(event) for event in run.events("trainer_0", "step.committed")]
    return fmean(later - earlier for earlier, later in pairwise(ends_s[_WARM_UP_STEPS - 1 :]))


def operation_times_s(call_s: float) -> tuple[float, float, float]:
    """Return how long a forward, the gradient of an input and those of parameters last on the emulated devices."""
    pace = emulated_pace(call_s, ())
    if pace is None:
        raise SystemExit("--call-ms: devices that take no time have no bubble to measure")
    return pace.forward_s, pace.input_gradient_s, pace.weight_gradient_s


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--call-ms", type=float, default=50.0, help="of a forward, and of a whole backward")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", default=",".join(Schedule))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    times_s = operation_times_s(options.call_ms / 1e3)
    work_s = options.microbatches * sum(times_s)
    table = Table("schedule", "ms a step", "bubble", "theory")
    figures: dict[str, dict[str, float]] = {}
    for schedule in map(Schedule, options.schedules.split(",")):
        took_s = step_s(schedule, options)
        bubble = 1 - work_s / took_s
        theory = bubble_of(schedule, options.stages, options.microbatches, *times_s)
        table.add_row(schedule.value, f"{took_s * 1e3:.1f}", f"{bubble:.1%}", f"{theory:.1%}")
        figures[schedule.value] = {"step_ms": took_s * 1e3, "bubble": bubble, "theory": theory}
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
