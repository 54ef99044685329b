#!/usr/bin/env python3
"""Kill servers of a real swarm again and again, and measure how much is trained, and how much of that is kept.

    python benchmarks/kept_work.py                      a kill each 60 s and each 15 s, five seeds each
    python benchmarks/kept_work.py --every 15 --seeds 1,2 --snapshots 0,10 --json kept.json
    python benchmarks/kept_work.py --upload-mbit 16     hosts whose uplink takes seconds for the state of a stage

Throughput is what trainers commit. A step that a replica has committed dies with it, if it is killed before the round's
average: the samples of the step are used, and its stage has learnt nothing from them. Kept is what is left: a sample
whose step one of S stages has lost counts by one S-th less. Both are shares of what a twin of the swarm trains without
faults at the same time, beside it: what else the machine does slows down both.

The swarm is that of `make run`, with its rounds of 60 steps, two stages with two replicas each; on one machine, with a
spare, or with `--upload-mbit` a client's host and two hosts of servers in network namespaces, without one (root).
`--emulated-device` makes each call of a stage last as long as on a slow device, waited for and not computed
(docs/reliability.md says what that leaves out). After each run everything is judged that `shoal chaos` judges.

Exit code: 0 if each run holds and the means of kept work reach the limits below, with snapshots; else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.hosts import two_server_hosts

from shoal.clock import SystemClock
from shoal.errors import RecordRejected, RunFailed
from shoal_lab.chaos.plan import PlannedFault, plan_faults
from shoal_lab.chaos.session import Chaos, not_got_over, swarm_of_one_host
from shoal_lab.observed import Swarm
from shoal_lab.verdict import judge

FLAGS = ("--no-wandb", "--log-level=debug", "--data.holdout-fraction=0.01", "--diloco.outer-steps=1000000")
NUM_SLOTS = 2
NUM_KILLS = 4
"""In each run; it lasts as many intervals."""
LIMITS = {60.0: 0.93, 15.0: 0.75}
"""By the seconds from one kill to the next: the mean share of the work that has to be kept, with snapshots."""


@dataclass
class Measured:
    """One run and its twin.

    Attributes:
        every_s: from one kill to the next.
        snapshots: steps from one snapshot of a replica to the next; 0: none.
        seed: of the kills.
        samples_per_s: that trainers have committed.
        kept_per_s: of them, those that the model has kept.
        usual_per_s: what the twin without faults has kept.
        problems: what does not hold.
    """

    every_s: float
    snapshots: int
    seed: int
    samples_per_s: float = 0.0
    kept_per_s: float = 0.0
    usual_per_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Share of what the twin has trained; 0 if there is nothing to compare."""
        return self.samples_per_s / self.usual_per_s if self.usual_per_s else 0.0

    @property
    def kept(self) -> float:
        """Share of what the twin has kept; 0 if there is nothing to compare."""
        return self.kept_per_s / self.usual_per_s if self.usual_per_s else 0.0


@contextmanager
def swarm_of(directory: Path, flags: Sequence[str], upload_mbit: float) -> Iterator[Swarm]:
    """Give a swarm that trains, on one host or on three."""
    if upload_mbit:
        capped = (*flags, f"--network.max-upload-mbit={upload_mbit:g}")
        with two_server_hosts(directory, capped, NUM_SLOTS) as (swarm, _):
            yield swarm
        return
    with swarm_of_one_host(directory, NUM_SLOTS, (*flags, "--num-servers=5")) as swarm:
        yield swarm


def measure(
    directory: Path, flags: Sequence[str], upload_mbit: float, plan: Sequence[PlannedFault], for_s: float
) -> tuple[float, float, list[str]]:
    """Train under these faults; return committed and kept samples per second, and what does not hold."""
    try:
        with swarm_of(directory, flags, upload_mbit) as swarm:
            log = swarm.client.require_log_dir() / "chaos.jsonl"
            outcome = Chaos(swarm, plan, SystemClock(), log=log).run(for_s)
            problems = [f"{found.check}: {problem}" for found in judge(outcome.evidence) for problem in found.problems]
            return outcome.samples_per_s, outcome.kept_per_s, problems + not_got_over(outcome)
    except (RunFailed, RecordRejected) as error:
        return 0.0, 0.0, [str(error)]


def measure_both(
    directory: Path, flags: Sequence[str], upload_mbit: float, every_s: float, snapshots: int, seed: int
) -> Measured:
    """Train under kills, and beside it without; what does not hold of either is said."""
    flags, for_s = (*flags, f"--diloco.snapshot-every-steps={snapshots}"), NUM_KILLS * every_s
    plans = {"killed": plan_faults(seed, for_s, every_s, ("server",)), "twin": ()}
    with ThreadPoolExecutor(len(plans)) as threads:
        runs = {
            name: threads.submit(measure, directory / name, flags, upload_mbit, plan, for_s)
            for name, plan in plans.items()
        }
        found = {name: run.result() for name, run in runs.items()}
    samples_per_s, kept_per_s, _ = found["killed"]
    problems = [f"{name}, {problem}" for name, (_, _, problems) in found.items() for problem in problems]
    return Measured(every_s, snapshots, seed, samples_per_s, kept_per_s, found["twin"][1], problems)


def campaign(arguments: argparse.Namespace, directory: Path, console: Console) -> list[Measured]:
    """Do all runs."""
    flags = (*FLAGS, *arguments.flag)
    if arguments.emulated_device_s:
        flags = (*flags, f"--emulation.call-s={arguments.emulated_device_s}")
    found: list[Measured] = []
    for snapshots, every_s, seed in product(arguments.snapshots, arguments.every, arguments.seeds):
        where = directory / f"snapshots-{snapshots}-every-{every_s:g}-seed-{seed}"
        result = measure_both(where, flags, arguments.upload_mbit, every_s, snapshots, seed)
        found.append(result)
        what = f"snapshots {snapshots}, a kill in {every_s:g} s, seed {seed}"
        rates = f"throughput {result.throughput:.1%}, kept {result.kept:.1%} of {result.usual_per_s:.1f} samples/s"
        console.print(f"{what}: {rates} {'; '.join(result.problems)}")
    return found


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=seconds, default=[60.0, 15.0], help="seconds between kills (60,15)")
    parser.add_argument("--seeds", type=whole, default=[1, 2, 3, 4, 5], help="of the kills, with commas (1,2,3,4,5)")
    parser.add_argument("--snapshots", type=whole, default=[10, 0], help="steps between snapshots, with commas (10,0)")
    parser.add_argument("--emulated-device", dest="emulated_device_s", type=float, default=0.03, help="seconds (0.03)")
    parser.add_argument("--upload-mbit", type=float, default=0.0, help="uplink of each process, between three hosts")
    parser.add_argument(
        "--flag", action="append", default=[], help="of the run, such as --flag=--model.hidden-size=192"
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs of all runs in this folder")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="kept-", ignore_cleanup_errors=True) as temporary:
        try:
            found = campaign(arguments, arguments.keep_logs or Path(temporary), console)
        except KeyboardInterrupt:
            return 130
    table = Table(title="Of the samples per second of a twin without faults: mean (least, most)")
    for column in ("a kill in", "snapshots each", "throughput", "kept"):
        table.add_column(column)
    late: list[str] = []
    for snapshots in arguments.snapshots:
        for every_s in arguments.every:
            runs = [each for each in found if (each.snapshots, each.every_s) == (snapshots, every_s)]
            columns = [each.throughput for each in runs], [each.kept for each in runs]
            shown = (f"{statistics.mean(c):.1%} ({min(c):.1%}, {max(c):.1%})" for c in columns)
            table.add_row(f"{every_s:g} s", f"{snapshots} steps" if snapshots else "never", *shown)
            kept, limit = statistics.mean(columns[1]), LIMITS.get(every_s, 0.0)
            if snapshots and kept < limit:
                late.append(f"a kill in {every_s:g} s: kept {kept:.1%}, the limit is {limit:.0%}")
    console.print(table)
    broken = [problem for each in found for problem in each.problems]
    for problem in (*broken, *late):
        console.print(problem)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    return 1 if broken or late else 0


def seconds(text: str) -> list[float]:
    """Return times that are written with commas."""
    return [float(part) for part in text.split(",")]


def whole(text: str) -> list[int]:
    """Return whole numbers that are written with commas."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
