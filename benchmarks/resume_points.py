#!/usr/bin/env python3
"""Kill every process of a run at a chosen point, and see that `--resume` goes on from the last good checkpoint.

    python benchmarks/resume_points.py                       twenty points: a quarter of an hour
    python benchmarks/resume_points.py --points mirror@rename+cut,client@prepared --seed 7 --json points.json

A small deterministic swarm of two stages trains on this machine, with one replica of each or two. One process kills
itself at the point (`emulation.deaths`), and as soon as that is seen everything else of the run is killed too. Six
points are inside the writing of a checkpoint, two between the first member's word that a record is prepared and its
commit, two after the first server has swapped a record in, ten anywhere, as the seed says. After four of them the
newest checkpoint is damaged: a file of a stage is cut short, a bit of another file or of the manifest is flipped, the
manifest is gone.

Judged, for each: what is on the disk is what the point means. `--resume` names the newest good checkpoint and those
that it passes over, starts from it, trains to the end and exits with 0. No sample is doubled or missing, the chain of
records is whole, `shoal replay` reproduces every round, nothing is left. The hashes of all rounds are those of a run of
the same seed that nobody has killed. The first step comes at most two seconds later than that of the start before the
kill: on an idle machine, otherwise as much later as a loop takes longer there (`--lenient` as in fault_points.py).

Exit code: 0 if all that holds, else 1; 130 if it was interrupted.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recovery_limits import Limit, slowness

from shoal.averaging.journal import read_records
from shoal.checkpoint.places import folder_of, round_of
from shoal.clock import SystemClock
from shoal.config.emulation import parse_death
from shoal.errors import RunFailed
from shoal.wire.messages.round import StageHashes
from shoal_lab.faults.whole_kills import COMMITTING, DAMAGES, SWAPPED, WRITING, WholeKill, all_points, planned
from shoal_lab.launched import Launched, launched, until
from shoal_lab.observed import Swarm
from shoal_lab.verdict import CHECKS, Check, Evidence, judge

NUM_ROUNDS, INNER_STEPS, KEEP_LAST = 10, 12, 3
CALL_S = 0.01
"""The least time of a call of a stage, so that a round takes a second: within it the mirror has to fetch a record."""
FLAGS = (
    "--deterministic",
    "--no-wandb",
    "--log-level=debug",
    "--model.hidden-size=48",
    "--data.seq-len=64",
    "--data.holdout-fraction=0.02",
    "--diloco.batch-size-per-step=4",
    f"--diloco.inner-steps={INNER_STEPS}",
    f"--diloco.outer-steps={NUM_ROUNDS}",
    f"--emulation.call-s={CALL_S}",
    "--param-mirror.every-rounds=1",
    f"--param-mirror.keep-last={KEEP_LAST}",
    # On a machine with more to do, servers come late: with fewer of them rounds are others.
    "--network.bootstrap-timeout-s=120",
)
RUN_S = 300.0
"""For a run that takes a quarter of a minute on an idle machine; it judges nothing."""
LATER = Limit(2.0, 0, 15.0)
"""So much later than in a fresh start the first step may come."""

Hashes = Mapping[int, Sequence[tuple[int, StageHashes]]]
"""By round, of each stage."""


@dataclass
class Resumed:
    """One point.

    Attributes:
        good: the round of the checkpoint that is to be gone on from.
        fresh_s: from the first start to its first step.
        resumed_s: from the second one to its first step.
        checked: what the checks have looked at.
        problems: what they have found.
    """

    kill: WholeKill
    good: int
    fresh_s: float
    resumed_s: float | None
    checked: list[str]
    problems: list[str]

    @property
    def later_s(self) -> float:
        """How much later than a fresh start's the first step came."""
        return 0.0 if self.resumed_s is None else self.resumed_s - self.fresh_s


def hashes_in(log_dir: Path) -> Hashes:
    """Return what the records of a run say of its stages."""
    return {
        record.round: [(outcome.stage, outcome.hashes) for outcome in record.stages]
        for record, _ in read_records(log_dir)
    }


def uninterrupted(directory: Path, flags: Sequence[str]) -> Hashes:
    """Run to the end, and return the hashes of all rounds.

    Raises:
        RunFailed: it did not end well.
    """
    with launched(directory, *flags) as run:
        if (code := run.ends(RUN_S)) != 0:
            raise RunFailed(f"the run that nobody has killed ends with exit code {code}:\n{run.output}")
        return hashes_in(run.require_log_dir())


def first_step_s(swarm: Swarm, since_s: float) -> float | None:
    """Return how long after a time the first step was committed; None: there is none."""
    steps = (step.at_s for slot in range(swarm.num_slots) for step in swarm.steps(slot) if step.at_s > since_s)
    return min((at_s - since_s for at_s in steps), default=None)


def killed(run: Launched, kill: WholeKill) -> int:
    """Kill everything as soon as the first process has died; return in which step or round that was.

    Raises:
        RunFailed: it has not died.
    """
    death = parse_death(kill.death)

    def is_dead() -> bool:
        run.require_running()
        return run.log_dir is not None and any(run.log_dir.glob("*.died"))

    until(is_dead, RUN_S, f"the death of {kill.death}")
    run.lose_host()
    return run.events(f"{death.role}_{death.processes[0]}", "emulation.death")[0]["number"]


def not_as_meant(kill: WholeKill, number: int, swarm: Swarm, checkpoints: Path) -> list[str]:
    """Return what of a point's meaning is not so after the kill."""
    where = kill.point.partition("@")[2]
    swapped = {event["round"] for server in swarm.servers for event in server.swapped()}
    if kill.point == COMMITTING and number in swapped:
        return [f"record {number} is swapped in"]
    if kill.point == SWAPPED and number not in swapped:
        return [f"record {number} is swapped in by nobody"]
    if kill.point not in WRITING:
        return []
    is_placed = (checkpoints / folder_of(number)).exists()
    if is_placed != (where in ("renamed", "removal")):
        return [f"the checkpoint of round {number} is {'' if is_placed else 'not '}in its place"]
    if not is_placed and not any(checkpoints.glob(f".{folder_of(number)}.*.unfinished")):
        return [f"nothing is left of the checkpoint of round {number}"]
    if where == "removal" and not any(checkpoints.glob(".round_*.old")):
        return ["nothing is being removed"]
    return []


def good_one(kill: WholeKill, checkpoints: Path, dice: random.Random) -> tuple[int, str]:
    """Damage the newest checkpoint if that is wanted; return the round of the newest good one, and what was damaged.

    Raises:
        RunFailed: there is none.
    """
    rounds = sorted(round for path in checkpoints.glob("round_*") if (round := round_of(path.name)) is not None)
    damaged = ""
    if kill.damage and rounds:
        newest = rounds.pop()
        name = DAMAGES[kill.damage](checkpoints / folder_of(newest), dice)
        damaged = f"the checkpoint of round {newest}: {name}"
    if not rounds:
        raise RunFailed("the run was killed before it had written enough checkpoints")
    return rounds[-1], damaged


def checks_of(good: int, damaged: str, since_s: float, reference: Hashes) -> Sequence[tuple[str, Check]]:
    """Return what has to be true of a run that was resumed, beside what has to be of any."""

    def goes_on_from_the_newest_good_one(evidence: Evidence) -> tuple[str, Sequence[str]]:
        output, run_id = evidence.swarm.client.output, evidence.directory.name
        problems: list[str] = []
        if f"resuming run {run_id} from its checkpoint of round {good} in" not in output:
            problems.append(f"it does not say that it resumes {run_id} from round {good}:\n{output}")
        if damaged and f"{damaged} " not in output:
            problems.append(f"it does not name {damaged}:\n{output}")
        if not damaged and "is passed over" in output:
            problems.append(f"it passes over a good one:\n{output}")
        read = {event["round"] for event in evidence.swarm.events("client_0", "stage.read", since_s)}
        if read != {good}:
            problems.append(f"it has read the checkpoints of rounds {sorted(read)} instead of {good}")
        return f"resumed from round {good}{' behind a damaged one' if damaged else ''}", problems

    def rounds_are_the_same(evidence: Evidence) -> tuple[str, Sequence[str]]:
        found = hashes_in(evidence.directory)
        others = [round for round in reference.keys() | found.keys() if found.get(round) != reference.get(round)]
        problems = [f"rounds {sorted(others)} are not those of the run that nobody has killed"] if others else []
        return f"{len(found)} rounds as without the kill", problems

    return (*CHECKS, ("checkpoint", goes_on_from_the_newest_good_one), ("rounds", rounds_are_the_same))


def one_point(
    kill: WholeKill, flags: Sequence[str], reference: Hashes, directory: Path, dice: random.Random
) -> Resumed:
    """Kill a run at a point, resume it, and look at what it has come to.

    Raises:
        RunFailed: it was not killed there, or did not end.
    """
    clock = SystemClock()
    begun_s = clock.unix_s()
    with launched(directory, *flags, f"--emulation.deaths={kill.death}") as lost:
        number = killed(lost, kill)
        swarm, log_dir = Swarm(lost, [lost], kill.num_replicas), lost.require_log_dir()
        fresh_s = first_step_s(swarm, begun_s)
    if fresh_s is None:
        raise RunFailed("no step was committed before the kill")
    checkpoints = directory / "logs/checkpoints" / log_dir.name
    problems = not_as_meant(kill, number, swarm, checkpoints)
    good, damaged = good_one(kill, checkpoints, dice)
    begun_s = clock.unix_s()
    with launched(directory, "--resume", "--no-wandb") as resumed:
        code = resumed.ends(RUN_S)
        swarm = Swarm(resumed, [resumed], kill.num_replicas)
        resumed_s = first_step_s(swarm, begun_s)
        evidence = Evidence(swarm, code, resumed.leftovers(), wanted_exit_code=0)
        findings = judge(evidence, checks_of(good, damaged, begun_s, reference))
    problems += [f"{finding.check}: {problem}" for finding in findings for problem in finding.problems]
    return Resumed(kill, good, fresh_s, resumed_s, [f"{each.check}: {each.text}" for each in findings], problems)


def late(each: Resumed, times: float, *, lenient: bool) -> list[str]:
    """Return whether the first step came too late, on a machine that takes so many times as long as an idle one."""
    limit_s = LATER.seconds(0.0, times, lenient=lenient)
    if each.resumed_s is None:
        return ["no step was committed"]
    if each.later_s <= limit_s:
        return []
    return [f"the first step came {each.later_s:.1f} s later than a fresh start's, the limit is {limit_s:.1f} s"]


def main() -> int:
    """Kill and resume at each point, print what came of it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", help="ROLE@POINT or ROLE@POINT+DAMAGE, with commas; all twenty by default")
    parser.add_argument("--seed", type=int, default=0, help="of the runs, the points and where they are (0)")
    parser.add_argument("--lenient", action="store_true", help="a limit for a load that comes and goes")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs of all runs in this folder")
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    try:
        kills = planned(arguments.points.split(",") if arguments.points else all_points(dice), dice, INNER_STEPS)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    directory = arguments.keep_logs or Path(tempfile.mkdtemp(prefix="resume-"))
    references: dict[int, Hashes] = {}
    done: list[Resumed] = []
    failures: list[str] = []
    times = slowness()
    try:
        for place, kill in enumerate(kills):
            num = kill.num_replicas
            flags = (*FLAGS, f"--run.seed={arguments.seed}", f"--num-servers={2 * num}")
            try:
                if num not in references:
                    references[num] = uninterrupted(directory / f"{num}-replicas", flags)
                found = one_point(kill, flags, references[num], directory / str(place), dice)
            except RunFailed as error:
                failures.append(f"{place} {kill}: {error}")
                console.print(failures[-1], style="red", markup=False, highlight=False)
                continue
            times = max(times, slowness())
            done.append(found)
            found.problems += late(found, times, lenient=arguments.lenient)
            failures += [f"{place} {kill}: {problem}" for problem in found.problems]
            console.print(f"{place} {kill}: from round {found.good}, {found.later_s:+.1f} s", highlight=False)
            for problem in found.problems:
                console.print(f"  {problem}", style="red", markup=False, highlight=False)
    except KeyboardInterrupt:
        return 130
    finally:
        if not arguments.keep_logs:
            shutil.rmtree(directory, ignore_errors=True)
    if arguments.json:
        machine = {"machine": platform.machine(), "system": platform.platform(), "cores": os.cpu_count()}
        content = {"seed": arguments.seed, **machine, "slowness": times}
        content |= {"failures": failures, "points": list(map(asdict, done))}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    later_s = [each.later_s for each in done] or [0.0]
    console.print(f"{len(done)} of {len(kills)} resumed; the machine took {times:.1f} times as long as an idle one")
    console.print(f"first step later by: median {statistics.median(later_s):.1f} s, most {max(later_s):.1f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
