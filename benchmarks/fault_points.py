#!/usr/bin/env python3
"""Kill roles of a real swarm at chosen points of a step or round, and measure how long its trainers are without a step.

    python benchmarks/fault_points.py                                  each point five times: about a quarter of an hour
    python benchmarks/fault_points.py --points server@commit,trainer@commit --repeat 20 --seed 7 --json points.json
    python benchmarks/fault_points.py --times trainer=3,data_server=6 --repeat 4     each role at least twenty times
    python benchmarks/fault_points.py --repeat 1 --lenient              as `make test-all` does, beside other tests

A swarm of two stages with two replicas each and a spare trains on this machine. Its processes have been told where to
die (`emulation.deaths`): they kill themselves at the point itself, so no timing decides what is hit. Which process, and
in which step or round, the seed says. A run has each point once, one after the other, those of a role in `--times` so
many times; `--repeat` is the number of runs.

Measured, for each trainer that was hit: the time from the death to its next committed step that could not have been
committed without getting over it; and for a server, until it has been started again and has its state, and each
trainer has a path of its own; for a death in a transfer of state, how much longer than before it the steps of those
trainers took that it did not hit. After each run: replicas agree bit for bit, no sample is missing or doubled, the
chain of records is whole, `shoal replay` reproduces every round, and nothing is left.

The limits are those of an idle machine. One that gives a loop on all of its cores, between the runs, a third of them
has three times as long: so what is judged is the swarm, and not what else the machine does. Load that comes and goes
within a run is not seen between the runs, and of a few deaths the slowest one is what load makes of it: so with
`--lenient` no limit is below some seconds (`recovery_limits.Limit.least_s`), which is what a broken recovery takes.

Exit code: 0 if all limits and checks hold, else 1; 130 if it was interrupted.
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
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recovery_limits import Measured, Result, by_role, held_up, late, slowness

from shoal.config.emulation import parse_death
from shoal.errors import RunFailed
from shoal_lab.bench.measure import percentile
from shoal_lab.chaos.session import ROUNDS_AFTER, TRAINING_FLAGS, swarm_of_one_host
from shoal_lab.event_log import time_of
from shoal_lab.faults.points import OF_TRANSFER, POINTS, chosen, ordered
from shoal_lab.launched import END_S, until
from shoal_lab.observed import Step, Swarm
from shoal_lab.verdict import Evidence, judge, samples_of

INNER_STEPS = 40
BUSY = 4.0
"""Times that things take where six other loops run on two cores."""
CALL_S = 0.03
"""The least time of a call of a stage, so that steps take a third of a second however fast the machine is."""
FLAGS = (*TRAINING_FLAGS, f"--diloco.inner-steps={INNER_STEPS}", f"--emulation.call-s={CALL_S}")
NUM_SERVERS, NUM_SLOTS = 5, 2
GAP_S = 3.0
"""So long after a death in a transfer of state the steps of others are looked at."""
RECOVERY_S = 90.0
"""Of a machine that is as busy as tests make it, and longer where one is busier: who has not got over a death by then
does not get over it."""


@dataclass
class Run:
    """One run, as a whole.

    Attributes:
        deaths: in their order.
        step_s: what a step usually takes.
        steps_lost: by stage: shares of steps that died with their replica.
        checked: what the checks have looked at.
        problems: what they have found.
    """

    deaths: list[str]
    step_s: float
    steps_lost: dict[int, int]
    checked: list[str]
    problems: list[str]


@dataclass(frozen=True)
class Dead:
    """A process that has died as it was ordered to."""

    role: str
    process: int
    at_s: float
    number: int


def died(swarm: Swarm, text: str) -> Dead | None:
    """Return who has died of this order, if somebody has."""
    death = parse_death(text)
    for process in death.processes:
        for event in swarm.events(f"{death.role}_{process}", "emulation.death"):
            if (event["point"], event["ordered"]) == (death.point, death.number):
                return Dead(death.role, process, time_of(event), event["number"])
    swarm.client.require_running()
    return None


def measure(swarm: Swarm, text: str, since_s: float, patience_s: float, *, is_alone: bool) -> Measured:
    """Wait for one death and for what comes after it.

    Args:
        swarm: that trains.
        text: the death, as it was ordered.
        since_s: when the death before it happened.
        patience_s: so long each thing is waited for.
        is_alone: whether the swarm gets whole again before the next one.

    Raises:
        RunFailed: it has not happened, or has not been got over.
    """
    dead = until(lambda: died(swarm, text), 2 * patience_s, f"the death of {text}")
    server = swarm.servers[dead.process] if dead.role == "server" else None
    hit = frozenset({dead.process}) if dead.role == "trainer" else frozenset(range(NUM_SLOTS))
    if server is not None:
        last = {slot: last_step_before(swarm, slot, dead.at_s) for slot in range(NUM_SLOTS)}
        hit = frozenset(slot for slot, step in last.items() if server.peer in step.path)

    def counts(step: Step) -> bool:
        """Whether the step could not have been committed without getting over it."""
        if server is not None:
            is_back = any(time_of(event) < step.at_s for event in server.swapped(dead.at_s))
            return server.peer not in step.path or is_back
        if dead.role == "trainer":
            return step.generation > last_step_before(swarm, dead.process, dead.at_s).generation
        return swarm.begun_after(dead.at_s)(step)

    def next_steps() -> dict[int, float]:
        return {
            slot: step.at_s - dead.at_s
            for slot in sorted(hit)
            if (step := next((s for s in swarm.steps(slot) if s.at_s > dead.at_s and counts(s)), None)) is not None
        }

    until(lambda: len(next_steps()) == len(hit), patience_s, f"a step after {text}")
    result = Measured(text, dead.number, dead.at_s, next_steps())
    if server is not None and is_alone:
        until(lambda: swarm.is_whole(server, dead.at_s), patience_s, f"a whole swarm after {text}")
        result.whole_s = (swarm.whole_at_s(server, dead.at_s) or 0.0) - dead.at_s
    if parse_death(text).point in OF_TRANSFER:
        result.gap_s = added_gap_s(swarm, frozenset(range(NUM_SLOTS)) - hit, since_s, dead.at_s)
    return result


def added_gap_s(swarm: Swarm, slots: Collection[int], since_s: float, at_s: float) -> float | None:
    """Return by how much a death at a moment has made a step of these trainers longer.

    The comparison is with what their steps took since the death before: two trainers that share a replica since then
    take longer for theirs, whatever is transferred.
    """
    found: list[float] = []
    for slot in slots:
        pairs = [(one, two) for one, two in pairwise(swarm.steps(slot)) if two.number % INNER_STEPS]
        before = [two.at_s - one.at_s for one, two in pairs if one.at_s > since_s and two.at_s <= at_s]
        after = [two.at_s - one.at_s for one, two in pairs if two.at_s > at_s and one.at_s < at_s + GAP_S]
        if before and after:
            found.append(max(after) - statistics.median(before))
    return max(found, default=None)


def last_step_before(swarm: Swarm, slot: int, at_s: float) -> Step:
    """Return the last step that a slot had committed at a time."""
    return [step for step in swarm.steps(slot) if step.at_s <= at_s][-1]


def usual_step_s(swarm: Swarm) -> float:
    """Return the median time between two steps of a round; deaths are too few to count."""
    found = [
        two.at_s - one.at_s
        for slot in range(NUM_SLOTS)
        for one, two in pairwise(swarm.steps(slot))
        if two.number % INNER_STEPS
    ]
    return statistics.median(found or [0.0])


def one_run(
    points: Sequence[str], dice: random.Random, directory: Path, console: Console, patience_s: float
) -> tuple[list[Measured], Run]:
    """Run one swarm through one death at each point, and check what is left of it."""
    deaths = ordered(points, dice, num_servers=NUM_SERVERS, num_slots=NUM_SLOTS, inner_steps=INNER_STEPS)
    with swarm_of_one_host(directory, NUM_SLOTS, (*FLAGS, f"--emulation.deaths={' '.join(deaths)}")) as swarm:
        found: list[Measured] = []
        for text, following in zip(deaths, [*deaths[1:], ""], strict=True):
            is_alone = not following.partition("@")[2].startswith(OF_TRANSFER)
            found.append(measure(swarm, text, found[-1].at_s if found else 0.0, patience_s, is_alone=is_alone))
            shown = ", ".join(f"trainer {slot}: {value:.2f} s" for slot, value in found[-1].seconds.items())
            whole = "" if found[-1].whole_s is None else f"; whole after {found[-1].whole_s:.1f} s"
            gap = "" if found[-1].gap_s is None else f"; steps of the others at most {found[-1].gap_s:.2f} s longer"
            console.print(f"  {text}: {shown or 'hit no trainer'}{whole}{gap}")
        records = swarm.num_records()
        until(lambda: swarm.num_records() >= records + ROUNDS_AFTER, patience_s, "rounds after the last death")
        step_s = usual_step_s(swarm)
        swarm.client.interrupt()
        evidence = Evidence(swarm, swarm.client.ends(END_S), swarm.client.leftovers())
        findings = judge(evidence)
        problems = [f"{finding.check}: {problem}" for finding in findings for problem in finding.problems]
        lost = dict(samples_of(evidence).steps_lost)
    return found, Run(deaths, step_s, lost, [f"{each.check}: {each.text}" for each in findings], problems)


def table(results: Sequence[Result]) -> Table:
    """Return what a reader wants to see; times in seconds."""
    shown = Table(title="From the death to the next committed step of the trainer that waited longest, in seconds")
    for column in ("point", "n", "p50", "p95", "max", "whole p50", "p95", "gap p50", "max"):
        shown.add_column(column, justify="left" if column == "point" else "right")
    for result in results:
        values, whole, gaps = result.worst_s, result.whole_s, result.gap_s
        shown.add_row(
            result.point,
            f"{len(values)}/{len(result.deaths)}",
            *(f"{value:.2f}" for value in (statistics.median(values), percentile(values, 0.95), max(values)))
            if values
            else ("", "", ""),
            *(f"{value:.1f}" for value in (statistics.median(whole), percentile(whole, 0.95))) if whole else ("", ""),
            *(f"{value:.2f}" for value in (statistics.median(gaps), max(gaps))) if gaps else ("", ""),
        )
    shown.caption = "n: deaths that hit a trainer, of all; whole: until it is again; gap: added to a step of the others"
    return shown


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default=",".join(POINTS), help=f"some of {', '.join(POINTS)}, with commas")
    parser.add_argument("--times", default="", help="times of a role's points in a run: trainer=3,data_server=6")
    parser.add_argument("--repeat", type=int, default=5, help="runs, each with one death at each point (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the processes, the steps and their order (0)")
    parser.add_argument("--lenient", action="store_true", help="limits for few deaths and a load that comes and goes")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs of all runs in this folder")
    arguments = parser.parse_args()
    try:
        points = chosen(arguments.points.split(","), arguments.times)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    directory = arguments.keep_logs or Path(tempfile.mkdtemp(prefix="points-"))
    results = {point: Result(point) for point in points}
    runs: list[Run] = []
    failures: list[str] = []
    times = slowness()
    try:
        for number in range(arguments.repeat):
            console.print(f"[bold]run {number + 1} of {arguments.repeat}")
            dice = random.Random(f"{arguments.seed} {number}")
            try:
                found, run = one_run(
                    points, dice, directory / str(number), console, RECOVERY_S * max(1.0, times / BUSY)
                )
            except RunFailed as error:
                failures.append(f"run {number + 1}: {error}")
                continue
            finally:
                times = max(times, slowness())
            runs.append(run)
            for each in found:
                death = parse_death(each.death)
                point = f"{death.role}@{death.point}"
                results.setdefault(point, Result(point)).deaths.append(each)
    except KeyboardInterrupt:
        return 130
    finally:
        if not arguments.keep_logs:
            shutil.rmtree(directory, ignore_errors=True)
    step_s = statistics.median([run.step_s for run in runs] or [0.0])
    failures += [problem for run in runs for problem in run.problems]
    roles = by_role(list(results.values()))
    lenient = arguments.lenient
    failures += [line for result in roles for line in late(result, step_s, times, lenient=lenient)]
    failures += [line for result in results.values() for line in held_up(result, step_s, times, lenient=lenient)]
    if arguments.json:
        machine = {"machine": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()}
        content = {"seed": arguments.seed, **machine, "step_s": step_s, "slowness": times, "failures": failures}
        content |= {"points": list(map(asdict, results.values())), "runs": list(map(asdict, runs))}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    console.print(table([*results.values(), *roles]))
    console.print(f"the machine took {times:.1f} times as long as an idle one")
    console.print(f"a step usually takes {step_s:.2f} s; steps lost by stage: {[run.steps_lost for run in runs]}")
    console.print("\n".join(f"[red]{line}" for line in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
