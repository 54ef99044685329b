#!/usr/bin/env python3
"""Train two replicas at the ends of a long, narrow line, and measure which part of the time they train, by codec.

    python benchmarks/far_rounds.py                                  20 Mbit/s, 150 ms: about ten minutes
    python benchmarks/far_rounds.py --cases int4,overlap --rounds 6 --json far_rounds.json

Two hosts in network namespaces (root; see benchmarks/lossy.py), real processes: on the near one the client, its
trainers and a server, on the far one a server. One stage of 20 million parameters, 30 steps a round; devices are
emulated, a step takes a second. Measured for each trainer from its first step of the second round to its first of the
last one:

    busy          steps times the mean time from one to the next within a round, as a part of the whole
    longest gap   from one step to the next

With --path instead: a small model in two stages, one at each end of the line. Measured: the time from one step to the
next, in round trips of the line. All four microbatches are in flight once the window has grown, and their gradients
have to come back, which takes one round trip. Two at most.

With --newcomer instead: the near server trains alone, and the far one is started once a round is recorded. Its state
has to cross the line, which takes longer than a round. Measured: the time until it has trained a step, and how many
rounds were recorded meanwhile, 6 at most.

Exit code: 0 if all limits hold, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.far_line import LineKind, far_hosts
from tests.e2e.hosts import hosts_of, invited

from shoal_lab.event_log import time_of
from shoal_lab.launched import END_S, START_S, Launched, until
from shoal_lab.observed import Step, Swarm

NUM_SLOTS = 2
STEPS = 30
BATCH = 16
"""Samples of a step on average: the near server, whose steps need no line, gets more of them."""
MODEL = (
    "--model.num-layers=8",
    "--model.hidden-size=448",
    "--model.num-heads=7",
    "--model-pipeline.stages=1",
)
SMALL = ("--model.num-layers=2", "--model.hidden-size=64", "--model.num-heads=4", "--model-pipeline.stages=2")
FLAGS = (
    "--data.seq-len=8",
    "--data.holdout-fraction=0.01",
    "--model-pipeline.microbatches=4",
    f"--diloco.batch-size-per-step={BATCH}",
    "--no-wandb",
    "--log-level=debug",
    "--run.deterministic=false",
    f"--diloco.inner-steps={STEPS}",
    "--diloco.averaging-timeout-s=600",
    "--run.eval-every=1000",
)
MAX_RECORDS = 6
MAX_ROUND_TRIPS = 2.0
NO_PACE = {"SHOAL_EMULATION__CALL_S": "0"}
PACE = {**NO_PACE, "SHOAL_EMULATION__SAMPLE_S": f"0={1 / BATCH}"}


@dataclass(frozen=True)
class Case:
    """How rounds are averaged, and what holds then."""

    flags: tuple[str, ...] = ()
    least_busy: float = 0.0
    most_busy: float = 1.0
    longest_gap_s: float | None = None


CASES = {
    "none": Case(most_busy=0.5),
    "sparse": Case(("--diloco.averaging-compression=sparse",), least_busy=0.95),
    "int4": Case(("--diloco.averaging-compression=int4",), most_busy=0.9),
    "overlap": Case(
        ("--diloco.averaging-compression=int4", "--diloco.overlap-steps=10"), least_busy=0.97, longest_gap_s=1.5
    ),
    "auto": Case(("--diloco.averaging-compression=auto", "--diloco.overlap-steps=10"), least_busy=0.97),
}


@dataclass(frozen=True)
class Figure:
    """What a case has come to; `busy`, `gap_s`: by trainer."""

    case: str
    busy: Sequence[float]
    gap_s: Sequence[float]
    pace_s: Sequence[float]

    @property
    def holds(self) -> bool:
        case, busy = CASES[self.case], statistics.mean(self.busy)
        is_steady = case.longest_gap_s is None or max(self.gap_s) <= case.longest_gap_s
        return case.least_busy <= busy <= case.most_busy and is_steady


def main() -> int:
    """Measure, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="none,sparse,int4,overlap,auto", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=4, help="three at least (4)")
    parser.add_argument("--newcomer", action="store_true", help="measure how long a server that comes late takes")
    parser.add_argument("--path", action="store_true", help="measure a step over two stages that are far apart")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.newcomer:
        after_s, num_records = newcomer()
        Console().print(f"the newcomer has trained a step after {after_s:.0f} s; {num_records} rounds were recorded")
        return 0 if num_records <= MAX_RECORDS else 1
    if options.path:
        round_trips = far_path(options.rounds)
        Console().print(f"a step over stages at both ends takes {round_trips:.2f} round trips of the line")
        return 0 if round_trips <= MAX_ROUND_TRIPS else 1
    figures = [measured(name, options.rounds) for name in options.cases.split(",")]
    table = Table("averaging", "busy", "longest gap, s", "a step, s", "limits hold")
    for each in figures:
        parts = (each.busy, each.gap_s, each.pace_s)
        said = [
            ", ".join(f"{value:.{digits}f}" for value in part) for part, digits in zip(parts, (3, 2, 2), strict=True)
        ]
        table.add_row(each.case, *said, str(each.holds))
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([{**asdict(each), "holds": each.holds} for each in figures], indent=1))
    return 0 if all(each.holds for each in figures) else 1


@contextmanager
def client_at_a_line(
    flags: Sequence[str], pace: Mapping[str, str] = PACE
) -> Iterator[tuple[Launched, Callable[[str], Launched]]]:
    """Start a client on the near host; gives it, and what starts a server on one of the hosts."""
    with (
        tempfile.TemporaryDirectory(prefix="far-rounds-") as directory,
        far_hosts(LineKind()) as line,
        hosts_of(Path(directory), line) as hosts,
    ):
        client = hosts.run("near", "start_trainer_client.py", *FLAGS, *flags, environment=pace)
        variable, command = invited(client)
        command[command.index("--num-servers") + 1] = "1"  # it names one for each stage
        hosts.give_key("near", "far")
        yield client, lambda host: hosts.run(host, *command, environment={**variable, **pace}, start="server")


def measured(name: str, num_rounds: int) -> Figure:
    """Train so many rounds, and see when steps were committed."""
    flags = (*MODEL, f"--num-servers={NUM_SLOTS}", f"--diloco.outer-steps={num_rounds}", *CASES[name].flags)
    with client_at_a_line(flags) as (client, server):
        servers = [server(host) for host in ("near", "far")]
        assert client.ends(num_rounds * STEPS * 10.0 + END_S) == 0, client.output
        steps = [Swarm(client, servers, NUM_SLOTS).steps(slot) for slot in range(NUM_SLOTS)]
    figures = [of_trainer(each, num_rounds) for each in steps]
    figure = Figure(name, *zip(*figures, strict=True))
    Console().print(f"  {name}: busy {statistics.mean(figure.busy):.3f}, longest gap {max(figure.gap_s):.2f} s")
    return figure


def far_path(num_rounds: int) -> float:
    """Train so many rounds over a path from one end of the line to the other; return a step's time in round trips."""
    flags = (*SMALL, "--num-servers=2", f"--diloco.outer-steps={num_rounds}")
    with client_at_a_line(flags, pace=NO_PACE) as (client, server):
        servers = [server(host) for host in ("near", "far")]
        assert client.ends(num_rounds * STEPS * 10.0 + END_S) == 0, client.output
        _, _, pace_s = of_trainer(Swarm(client, servers, 1).steps(0), num_rounds)
    return pace_s / LineKind().round_trip_s


def newcomer() -> tuple[float, int]:
    """Start a server at the other end of the line; return after which time, and how many records, it has trained."""
    flags = (*MODEL, "--num-servers=1", "--diloco.outer-steps=1000", *CASES["int4"].flags)
    with client_at_a_line(flags) as (client, server):
        swarm = Swarm(client, [server("near")], 1)
        until(swarm.is_training, 2 * START_S, "a first record")
        from_s = time.time()
        server("far")
        step_s = time_of(client.saw("trainer_1", "step.committed", 3 * START_S))
        num_records = swarm.records_between(from_s, step_s)
        client.interrupt()
        client.ends(END_S)
    return step_s - from_s, num_records


def of_trainer(steps: Sequence[Step], num_rounds: int) -> tuple[float, float, float]:
    """Which part of the time a trainer has trained, its longest gap, and its mean time from step to step in a round."""
    measured = sorted((s for s in steps if STEPS <= s.number <= STEPS * (num_rounds - 1)), key=lambda step: step.at_s)
    gaps = [(later.number % STEPS == 0, later.at_s - earlier.at_s) for earlier, later in pairwise(measured)]
    pace_s = statistics.mean(gap_s for is_between_rounds, gap_s in gaps if not is_between_rounds)
    all_s = [gap_s for _, gap_s in gaps]
    return pace_s * len(gaps) / sum(all_s), max(all_s), pace_s


if __name__ == "__main__":
    sys.exit(main())
