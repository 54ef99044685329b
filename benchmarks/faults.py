#!/usr/bin/env python3
"""Kill every kind of process of a real swarm at random moments, and measure how long its trainers are without a step.

    python benchmarks/faults.py                              all kinds, five times each: about an hour
    python benchmarks/faults.py --kinds server,trainer --seed 7 --json faults.json

For each kind a swarm of two stages with two replicas each trains on this machine; faults of links, and
`supervisor-hosts`, need root, for hosts in network namespaces. Measured, for each trainer that was hit: the time from
the fault to its next committed step that could not have been committed without getting over the fault (not over the
dead server, not by the dead trainer). The limits are those that docs/reliability.md promises. After each run: replicas
agree bit for bit in every round, `shoal replay` reproduces every round, no sample is missing or doubled, and no
process, shared memory or temporary file is left.

Exit code: 0 if all limits and checks hold, else 1. Ended by Ctrl-C, SIGTERM or SIGHUP it ends its swarm first, leaves
neither a process nor a namespace, and exits with 128 and the signal's number.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.signals import ended_by_signals
from tests.e2e.deaths import LINK_KINDS, link_down
from tests.e2e.hosts import two_server_hosts
from tests.e2e.launched import START_S, launched, until
from tests.e2e.namespaces import Lan, why_impossible

from shoal.averaging.journal import read_records
from shoal.errors import RunFailed
from shoal_lab.event_log import time_of
from shoal_lab.faults.deaths import KINDS, STAGE, Kind, Strike, inflict
from shoal_lab.observed import Swarm
from shoal_lab.verdict import TRAINED, Evidence, judge

# The model of `make run`, with shorter rounds, so that some faults meet the end of one.
INNER_STEPS = 40
FLAGS = (
    "--no-wandb",
    "--log-level=debug",
    "--data.holdout-fraction=0.02",
    f"--diloco.inner-steps={INNER_STEPS}",
    "--diloco.outer-steps=100000",
)
NUM_SLOTS = 2
ALL_KINDS = {**KINDS, "stage": STAGE}
HELD_S = 1.0
"""So long after a record a mirror has it."""
PAUSE_S = (1.0, 4.0)
"""Of training between two faults, drawn evenly: about one round."""


@dataclass
class Fault:
    """One fault and what it cost.

    Attributes:
        victim: who was struck.
        phase: between two steps of a round ("training"), or between two rounds ("averaging").
        seconds: for each trainer that was hit, from the fault to the step that counts.
        steps_skipped: numbers that its next step left out.
        longest_pause_s: of the swarm between any two steps, from the fault until it was whole again.
    """

    victim: str
    phase: str
    seconds: dict[int, float]
    steps_skipped: dict[int, int]
    longest_pause_s: float = 0.0

    @property
    def worst_s(self) -> float:
        """Of the trainer that waited longest; 0 if the fault hit none."""
        return max(self.seconds.values(), default=0.0)


@dataclass
class Result:
    """All runs of one kind."""

    kind: str
    limit_s: float | None = None
    limit_steps: int = 0
    step_s: float = 0.0
    round_gap_s: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def limit(self) -> float | None:
        """Seconds that a trainer may be without a step."""
        return None if self.limit_s is None else self.limit_s + self.limit_steps * self.step_s

    def values(self, *, training: bool = False) -> list[float]:
        """Return what the faults cost, worst trainer each; `training`: only those that struck between two steps."""
        return [f.worst_s for f in self.faults if f.seconds and (f.phase == "training" or not training)]


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    every = [*ALL_KINDS, *LINK_KINDS, "supervisor", "supervisor-hosts"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(every), help=f"some of {', '.join(every)}, with commas")
    parser.add_argument("--repeat", type=int, default=5, help="faults of each kind (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (0)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs of all runs in this folder")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    if unknown := sorted(set(kinds) - set(every)):
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(every)}")
    console = Console()
    directory = arguments.keep_logs or Path(tempfile.mkdtemp(prefix="faults-"))
    results: list[Result] = []
    try:
        for kind in kinds:
            console.print(f"[bold]{kind}[/bold] ({arguments.repeat} times)")
            result = measure(kind, arguments.repeat, arguments.seed, directory / kind, console)
            results.append(result)
            if arguments.json:
                arguments.json.write_text(json.dumps(as_json(results, arguments.seed), indent=2) + "\n")
    finally:
        if not arguments.keep_logs:
            shutil.rmtree(directory, ignore_errors=True)
    console.print(table(results))
    failed = [f"{result.kind}: {problem}" for result in results for problem in result.problems]
    for line in failed:
        console.print(f"[red]{line}")
    return 1 if failed else 0


def measure(name: str, repeat: int, seed: int, directory: Path, console: Console) -> Result:
    """Measure one kind of fault."""
    result = Result(name)
    dice = random.Random(f"{seed} {name}")
    if name in (*LINK_KINDS, "supervisor-hosts") and (reason := why_impossible()):
        result.problems.append(f"not measured: {reason}")
        return result
    try:
        if name == "supervisor":
            for number in range(repeat):
                supervisor_dies(result, dice, directory / str(number))
        elif name == "supervisor-hosts":
            for number in range(repeat):
                supervisor_of_a_host_dies(result, dice, directory / str(number))
        else:
            strike_repeatedly(result, dice, repeat, directory, console)
    except (AssertionError, RunFailed) as error:
        result.problems.append(str(error))
    if result.limit is not None and (late := [value for value in result.values() if value > result.limit]):
        result.problems.append(f"{len(late)} of {len(result.values())} took longer than {result.limit:.2f} s: {late}")
    return result


def strike_repeatedly(result: Result, dice: random.Random, repeat: int, directory: Path, console: Console) -> None:
    """Strike several times in one run, and check it at its end."""
    link = LINK_KINDS.get(result.kind)
    with swarm_of_one_host(directory) if link is None else swarm_of_hosts(directory, link) as (swarm, kind):
        kind = kind or ALL_KINDS[result.kind]
        result.limit_s, result.limit_steps = kind.limit_s, kind.limit_steps
        strikes: list[Strike] = []
        for _ in range(repeat):
            train(swarm, dice)
            strike = inflict(kind, swarm, dice)
            strikes.append(strike)
            fault = cost(swarm, strike)
            result.faults.append(fault)
            shown = ", ".join(f"trainer {slot}: {value:.3f} s" for slot, value in fault.seconds.items())
            console.print(f"  {strike.victim} ({fault.phase}): {shown or 'hit no trainer'}")
        train(swarm, dice)
        result.step_s, result.round_gap_s = usual_times(swarm, strikes)
        end(swarm, result)
        if kind is STAGE:
            result.problems += restored_from_older(swarm, strikes)


def restored_from_older(swarm: Swarm, strikes: Sequence[Strike]) -> list[str]:
    """Return which stages that lost all servers went on from an older record than a mirror has to hold by then."""
    recorded = swarm.events("client_0", "round.recorded")
    rounds = {event["round"]: time_of(event) for event in recorded}
    problems: list[str] = []
    for record, _ in read_records(swarm.client.require_log_dir()):
        for outcome in record.stages:
            if outcome.restored is None:
                continue
            begun_s = max(strike.at_s for strike in strikes if strike.at_s < rounds[record.round])
            held = max(round for round, at_s in rounds.items() if at_s < begun_s - HELD_S)
            if outcome.restored.round < held:
                problems.append(f"stage {outcome.stage} went on from record {outcome.restored.round}, not {held}")
    return problems


def supervisor_dies(result: Result, dice: random.Random, directory: Path) -> None:
    """Kill the supervisor of a swarm on one host: everything ends with it."""
    with swarm_of_one_host(directory) as (swarm, _):
        train(swarm, dice)
        swarm.client.kill()
        began_s = time.monotonic()
        swarm.client.leaves_nothing()
        result.faults.append(Fault(f"supervisor, all gone after {time.monotonic() - began_s:.2f} s", "", {}, {}))
        check(swarm, result)


def supervisor_of_a_host_dies(result: Result, dice: random.Random, directory: Path) -> None:
    """Kill the supervisor of a host of servers, then that of the client's host.

    Training goes on over the other host's servers; without a client they wait for one, until they are ended.
    """
    result.limit_s, result.limit_steps = KINDS["server"].limit_s, KINDS["server"].limit_steps
    with swarm_of_hosts(directory) as (swarm, _):
        train(swarm, dice)
        dies = dice.choice(list(swarm.server_hosts))
        (other,) = (host for host in swarm.server_hosts if host is not dies)
        peers = {server.peer for server in swarm.servers if server.host is dies}
        hit, at_s = swarm.users_of(peers), time.time()
        last = {slot: swarm.last_step(slot) for slot in hit}
        dies.kill()
        strike = Strike(
            at_s, "supervisor of servers", hit, lambda: True, lambda s: not peers & set(s.path), before=last
        )
        until(lambda: strike.is_over(swarm), 60.0, "a step over the other host")
        result.faults.append(cost(swarm, strike))
        dies.leaves_nothing()
        # What slots have left out of the fault's round is free again, and trained in the rounds after it.
        until(lambda: len(swarm.events("client_0", "round.recorded", at_s)) >= 3, 120.0, "two rounds after the fault's")
        train(swarm, dice)
        swarm.client.kill()
        swarm.client.leaves_nothing()
        time.sleep(5.0)
        assert other.process.poll() is None, "the servers of the other host do not wait for a client"
        result.step_s, result.round_gap_s = usual_times(swarm, [strike])
        other.interrupt()
        assert other.ends(15.0) == 130, other.output
        other.leaves_nothing()
        check(swarm, result)


@contextmanager
def swarm_of_one_host(directory: Path) -> Iterator[tuple[Swarm, Kind | None]]:
    """Give a swarm that trains on this machine."""
    with launched(directory, *FLAGS) as run:
        yield training(Swarm(run, [run], NUM_SLOTS)), None


@contextmanager
def swarm_of_hosts(directory: Path, link: Callable[[Lan], Kind] = link_down) -> Iterator[tuple[Swarm, Kind | None]]:
    """Give a swarm that trains on a client's host and two hosts of servers, and the fault of their links."""
    with two_server_hosts(directory, FLAGS, NUM_SLOTS) as (swarm, network):
        yield swarm, link(network)


def training(swarm: Swarm) -> Swarm:
    """Wait until a swarm trains."""
    until(swarm.is_training, 2 * START_S, "training")
    return swarm


def train(swarm: Swarm, dice: random.Random) -> None:
    """Let it train for a random time."""
    time.sleep(dice.uniform(*PAUSE_S))


def cost(swarm: Swarm, strike: Strike) -> Fault:
    """Return what a fault has cost."""
    seconds: dict[int, float] = {}
    skipped: dict[int, int] = {}
    for slot in sorted(strike.hit):
        step = strike.next_step(swarm, slot)
        assert step is not None
        if strike.away and not (strike.before[slot].number + 1) % INNER_STEPS:
            continue  # It had done its steps of the round; with fewer paths than trainers it has none of the next one.
        seconds[slot] = step.at_s - strike.at_s
        skipped[slot] = step.number - strike.before[slot].number - 1
    pause_s = swarm.longest_pause_s(strike.at_s, time.time())
    return Fault(strike.victim, phase_at(swarm, strike.at_s), seconds, skipped, pause_s)


def phase_at(swarm: Swarm, at_s: float) -> str:
    """Return whether a moment lies between two steps of a round, or between two rounds."""
    for slot in range(swarm.num_slots):
        done = [step for step in swarm.steps(slot) if step.at_s <= at_s]
        if done and (done[-1].number + 1) % INNER_STEPS:
            return "training"
    return "averaging"


def usual_times(swarm: Swarm, strikes: Sequence[Strike]) -> tuple[float, float]:
    """Return the median time between two steps of a round, and between two rounds, away from the faults."""
    within: list[float] = []
    between: list[float] = []
    for slot in range(swarm.num_slots):
        steps = swarm.steps(slot)
        for one, two in pairwise(steps):
            if one.generation != two.generation or any(one.at_s < s.at_s + 15 and s.at_s < two.at_s for s in strikes):
                continue
            (within if (two.number % INNER_STEPS) else between).append(two.at_s - one.at_s)
    return statistics.median(within), statistics.median(between) if between else 0.0


def end(swarm: Swarm, result: Result) -> None:
    """Interrupt the run, and check what it leaves."""
    swarm.client.interrupt()
    code = swarm.client.ends(20.0)
    assert code == 130, f"exit code {code}: {swarm.client.output}"
    for host in swarm.server_hosts:
        assert host is swarm.client or host.ends(20.0) == 0, host.output
    for host in swarm.hosts:
        host.leaves_nothing()
    summary = swarm.client.summary()
    assert (summary["duplicates"], summary["missing"]) == (0, 0), summary
    check(swarm, result)


def check(swarm: Swarm, result: Result) -> None:
    """Check what was trained."""
    evidence = Evidence(swarm, swarm.client.process.returncode, ())
    for finding in judge(evidence, TRAINED):
        result.checked.append(f"{finding.check}: {finding.text}")
        result.problems += [f"{finding.check}: {problem}" for problem in finding.problems]


def as_json(results: Sequence[Result], seed: int) -> dict[str, object]:
    """Return everything that was measured."""
    machine = {"machine": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()}
    return {"seed": seed, **machine, "kinds": [asdict(result) | {"limit": result.limit} for result in results]}


def table(results: Sequence[Result]) -> Table:
    """Return what a reader wants to see; times in seconds."""
    shown = Table(title="From the fault to the next committed step of the trainer that waited longest, in seconds")
    for column in (
        "fault",
        "n",
        "median",
        "max",
        "limit",
        "step",
        "between rounds",
        "median - 2 steps",
        "longest pause",
        "all",
        "checks",
    ):
        shown.add_column(column, justify="left" if column in ("fault", "all", "checks") else "right")
    for result in results:
        values = result.values()
        median = statistics.median(values) if values else None
        shown.add_row(
            result.kind,
            str(len(result.faults)),
            _text(median),
            _text(max(values, default=None)),
            _text(result.limit),
            _text(result.step_s),
            _text(result.round_gap_s),
            _text(None if median is None else median - 2 * result.step_s),
            _text(max((f.longest_pause_s for f in result.faults), default=None)),
            " ".join(f"{f.worst_s:.2f}{'' if f.phase == 'training' else '*'}" for f in result.faults if f.seconds),
            "ok" if not result.problems else "FAILED",
        )
    shown.caption = "* the fault struck between two rounds"
    return shown


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    ended_by_signals(main)
