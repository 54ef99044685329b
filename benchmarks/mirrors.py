#!/usr/bin/env python3
"""Measure what a mirror costs a run that trains, and what a mirror in trouble costs it.

    python benchmarks/mirrors.py                                        an hour and a half, on an idle machine
    python benchmarks/mirrors.py --inner-steps 20 --rounds 3            half an hour
    python benchmarks/mirrors.py --troubles none,slow --pairs 2 --json mirrors.json

A client's host, two hosts of two servers and a host of a mirror, each in a network namespace (needs root), train a
model of two stages; a checkpoint is wanted of every record. For each trouble some rounds with the mirror are compared
with as many without it, in turns, within one run:

    none         the mirror does all that it has to do
    killed       it is killed in every round, and started again by its launcher
    frozen       it stands still
    slow         its link carries 1 Mbit/s in each direction
    full         it writes to a disk of 4 MB, which holds no second checkpoint
    unreachable  it writes to an object store that nobody serves
    checkpoints  (a question of its own) on one machine, at its full speed, a checkpoint is written in every second
                 round; these are compared with the others

Computing takes at least `--call-s` for each call of a stage, as on devices of their own: otherwise the cores that a
mirror shares with trainers are what is measured. CPU seconds are those of all processes of the run, by sample. What
stages compute takes nearly all of them, and varies by more than a checkpoint takes: what that takes is seen in all
other threads. After each run every checkpoint has to be as it was written.

Exit code: 0 if samples per second with a mirror are at least 0.98 of those without, and the longest time between two
steps of a trainer at most 1.1 times as long, for each trouble, and if a checkpoint of every record takes at most 2 % of
the CPU seconds; else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.idle import roles_of, used
from benchmarks.signals import ended_by_signals
from tests.e2e.hosts import Hosts, end_whole, hosts_of, start_two_server_hosts
from tests.e2e.launched import END_S, START_S, Launched, launched, until
from tests.e2e.namespaces import Lan, lan, why_impossible

from shoal.checkpoint.store import CheckpointStore, stores_at
from shoal.errors import RunFailed
from shoal_lab.event_log import time_of
from shoal_lab.observed import Step, Swarm

NUM_SLOTS = 2
FLAGS = (
    "--no-wandb",
    "--log-level=debug",
    "--data.holdout-fraction=0.02",
    "--diloco.outer-steps=100000",
    "--no-param-mirror-enable",
)
DISK_MB = 4
STORE = "s3://nowhere/checkpoints"
NOWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
}
"""Where an object store is looked for, and is not."""
LEAST_SHARE, MOST_TIMES, MOST_CPU_SHARE = 0.98, 1.1, 0.02
CHECKPOINTS = "checkpoints"
ROUND_S = 60.0
"""Far more than a round takes; it judges nothing."""


@dataclass
class Phase:
    """Some rounds.

    Attributes:
        samples_per_s: of all trainers.
        gaps_s: of each round the longest time between two steps of one trainer.
        cpu_s: of all processes, by sample.
        beside_s: the same without the threads in which servers compute.
    """

    samples_per_s: float
    gaps_s: tuple[float, ...]
    cpu_s: float
    beside_s: float


@dataclass(frozen=True)
class Mark:
    """The end of a round, and what the processes of the run have computed until then; see `cpu_s`."""

    at_s: float
    cpu_s: float
    beside_s: float


@dataclass
class Result:
    """One trouble: phases without the mirror, and as many with it."""

    trouble: str
    without: list[Phase] = field(default_factory=list)
    beside: list[Phase] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take_checkpoints(self, stores: Sequence[CheckpointStore]) -> None:
        """Look at every checkpoint that is there."""
        for listed in (each for store in stores for each in store.listed()):
            self.checkpoints.append(listed.round)
            self.problems += [f"the checkpoint of round {listed.round}: {problem}" for problem in listed.problems]

    def times(self, of: Callable[[Sequence[Phase]], float]) -> float:
        """Return by what a figure is multiplied with the mirror."""
        return of(self.beside) / of(self.without)


def samples_per_s(phases: Sequence[Phase]) -> float:
    """The median of these phases."""
    return statistics.median(each.samples_per_s for each in phases)


def gap_s(phases: Sequence[Phase]) -> float:
    """The median of all rounds of these phases: of one round to the next it varies by a tenth."""
    return statistics.median(gap_s for each in phases for gap_s in each.gaps_s)


def cpu_by_sample_s(phases: Sequence[Phase]) -> float:
    """The median of these phases."""
    return statistics.median(each.cpu_s for each in phases)


@dataclass
class Training:
    """A run that trains."""

    swarm: Swarm

    def next_round(self) -> float:
        """Wait for the end of the round under way; return when that was."""
        before = self.swarm.num_records()
        until(lambda: self._lives() and self.swarm.num_records() > before, ROUND_S, "the next record")
        return time_of(self.swarm.events("client_0", "round.recorded")[before])

    def phase(self, num_rounds: int, in_each: Callable[[], None], hosts: Sequence[Launched]) -> Phase:
        """Measure so many rounds."""
        marks = [self.mark(hosts)]
        for _ in range(num_rounds):
            in_each()
            marks.append(self.mark(hosts))
        return self.between(marks)

    def mark(self, hosts: Sequence[Launched]) -> Mark:
        """Wait for the end of the round under way."""
        return Mark(self.next_round(), *cpu_s(hosts))

    def between(self, marks: Sequence[Mark]) -> Phase:
        """Return what there is between the ends of rounds that follow each other."""
        begun, ended = marks[0], marks[-1]
        samples = sum(step.samples for step in self.swarm.steps_between(begun.at_s, ended.at_s))
        return Phase(
            samples / (ended.at_s - begun.at_s),
            tuple(self._longest_gap_s(one.at_s, two.at_s) for one, two in pairwise(marks)),
            (ended.cpu_s - begun.cpu_s) / samples,
            (ended.beside_s - begun.beside_s) / samples,
        )

    def _longest_gap_s(self, from_s: float, to_s: float) -> float:
        """Return the longest time between two steps of one trainer, up to a step between these times."""

        def gaps(steps: Sequence[Step]) -> Iterator[float]:
            for one, two in pairwise(steps):
                if from_s <= two.at_s <= to_s:
                    yield two.at_s - one.at_s

        return max(gap for slot in range(NUM_SLOTS) for gap in gaps(self.swarm.steps(slot)))

    def _lives(self) -> bool:
        self.swarm.client.require_running()
        return True


@dataclass
class Setup(Training):
    """A run that trains, and the host of its mirror."""

    hosts: Hosts
    network: Lan
    environment: dict[str, str]
    checkpoints: str
    num_mirrors: int = 0

    def start_mirror(self) -> Launched:
        """Start the mirror, and wait until it holds both stages."""
        self.num_mirrors += 1
        name = f"start-{self.num_mirrors}"
        flag = f"--checkpoint-dir={self.checkpoints}"
        run = self.hosts.run("nas", "-m", "shoal", "mirror", flag, environment=self.environment, start=name)
        for stage in range(2):
            run.saw("mirror_0", "mirror.holds", START_S, stage=stage)
        return run


def cpu_s(hosts: Sequence[Launched]) -> tuple[float, float]:
    """Return what the living processes of these commands have used so far, and without what servers compute."""
    names = roles_of(host.process.pid for host in hosts)
    all_s = {pid: each.core_s for pid in names if (each := used(pid)) is not None}
    # The first thread of a server has its connections, its donor of states and its files; others compute.
    first_s = {pid: each.core_s for pid in all_s if names[pid] == "server" and (each := used(pid, pid)) is not None}
    return sum(all_s.values()), sum((all_s | first_s).values())


# ---- troubles: each changes what the mirror's host is, and what happens to the mirror in each round


@contextlib.contextmanager
def nothing(_: Setup, __: Launched) -> Iterator[Callable[[], None]]:
    """Leave the mirror alone."""
    yield lambda: None


@contextlib.contextmanager
def killed(_: Setup, mirror: Launched) -> Iterator[Callable[[], None]]:
    """Kill the mirror once a round."""

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mirror.living_pid_of("mirror:0"), signal.SIGKILL)

    yield kill


@contextlib.contextmanager
def frozen(_: Setup, mirror: Launched) -> Iterator[Callable[[], None]]:
    """Let the mirror stand still."""
    pid = mirror.living_pid_of("mirror:0")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield lambda: None
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def slow(setup: Setup, _: Launched) -> Iterator[Callable[[], None]]:
    """Let the mirror's link carry one megabit a second."""
    setup.network.set_rate("nas", "1mbit")
    try:
        yield lambda: None
    finally:
        setup.network.set_rate("nas", None)


TROUBLES = {
    "none": nothing,
    "killed": killed,
    "frozen": frozen,
    "slow": slow,
    "full": nothing,
    "unreachable": nothing,
}
QUESTIONS = (*TROUBLES, CHECKPOINTS)


@contextlib.contextmanager
def place(trouble: str, directory: Path) -> Iterator[str]:
    """Give the location of the checkpoints of a mirror that has this trouble."""
    if trouble != "full":
        yield STORE if trouble == "unreachable" else str(directory / "checkpoints")
        return
    disk = directory / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(disk)], check=True)
    try:
        yield str(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@contextlib.contextmanager
def training(directory: Path, flags: Sequence[str], checkpoints: str) -> Iterator[Setup]:
    """Give a run that trains without a mirror; one that is started writes its checkpoints there."""
    with lan("client", "left", "right", "nas") as network, hosts_of(directory, network) as hosts:
        swarm, variable = start_two_server_hosts(hosts, (*FLAGS, *flags), NUM_SLOTS)
        hosts.give_key("client", "nas")
        yield Setup(swarm, hosts, network, {**variable, **NOWHERE}, checkpoints)


def measure(trouble: str, pairs: int, num_rounds: int, flags: Sequence[str], directory: Path) -> Result:
    """Compare rounds with a mirror that has a trouble with rounds without one."""
    result = Result(trouble)
    with place(trouble, directory) as checkpoints, training(directory, flags, checkpoints) as setup:
        hosts = setup.swarm.hosts
        for _ in range(pairs):
            result.without.append(setup.phase(num_rounds, lambda: None, hosts))
            mirror = setup.start_mirror()
            with TROUBLES[trouble](setup, mirror) as in_each:
                result.beside.append(setup.phase(num_rounds, in_each, [*hosts, mirror]))
            mirror.interrupt()
            mirror.ends(END_S)
            result.said += [line for line in mirror.output.splitlines() if "WARNING" in line or "checkpoint" in line]
        end_whole(setup.swarm)
        # A mirror that stands still from the beginning has written none.
        if Path(checkpoints).is_dir():
            result.take_checkpoints(stores_at(checkpoints))
    share, times = result.times(samples_per_s), result.times(gap_s)
    if share < LEAST_SHARE:
        result.problems.append(f"{share:.3f} of the samples per second without, at least {LEAST_SHARE} are wanted")
    if times > MOST_TIMES:
        result.problems.append(f"the longest gap is {times:.2f} times as long as without, at most {MOST_TIMES}")
    return result


def measure_checkpoints(num_rounds: int, directory: Path) -> Result:
    """Compare the rounds of one run in which a checkpoint is written, every second one, with the others."""
    result = Result(CHECKPOINTS)
    flags = ("--no-wandb", "--log-level=debug", "--diloco.outer-steps=100000", "--param-mirror.every-rounds=2")
    with launched(directory / CHECKPOINTS, *flags) as run:
        setup = Training(Swarm(run, [run], NUM_SLOTS))
        run.saw("mirror_0", "checkpoint.written", START_S)
        marks = [setup.mark([run]) for _ in range(1 + 2 * num_rounds)]
        run.interrupt()
        run.ends(END_S)
        written_s = [time_of(event) for event in setup.swarm.events("mirror_0", "checkpoint.written")]
        for one, two in pairwise(marks):
            is_written = any(one.at_s < at_s <= two.at_s for at_s in written_s)
            (result.beside if is_written else result.without).append(setup.between([one, two]))
        result.take_checkpoints(stores_at(str(run.require_log_dir().parent / "checkpoints")))
    if abs(len(result.beside) - len(result.without)) > 1:
        raise RunFailed(f"in {len(result.beside)} of {2 * num_rounds} rounds a checkpoint was written")
    beside_s = [statistics.median(each.beside_s for each in phases) for phases in (result.without, result.beside)]
    share = (beside_s[1] - beside_s[0]) / cpu_by_sample_s(result.without)
    result.said.append(f"a checkpoint of every record takes {100 * share:.2f} % of the CPU seconds of the run")
    if share > MOST_CPU_SHARE:
        result.problems.append(f"a checkpoint of every record takes {100 * share:.2f} % of the CPU seconds")
    return result


def table(results: Sequence[Result]) -> Table:
    """Return what a reader wants to see: figures without the mirror, and by what they are multiplied with it."""
    shown = Table(title="A run beside a mirror, compared with the same run without")
    for column in ("mirror", "samples/s", "with", "longest gap", "with", "CPU/sample", "with", "checkpoints"):
        shown.add_column(column, justify="left" if column in ("mirror", "checkpoints") else "right")
    for result in results:
        shown.add_row(
            result.trouble,
            f"{samples_per_s(result.without):.1f}",
            f"{result.times(samples_per_s):.3f}",
            f"{gap_s(result.without):.2f} s",
            f"{result.times(gap_s):.2f}",
            f"{1000 * cpu_by_sample_s(result.without):.2f} ms",
            f"{result.times(cpu_by_sample_s):.3f}",
            " ".join(map(str, result.checkpoints)) or "none",
        )
    return shown


def main() -> int:
    """Measure what was asked for, print it, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--troubles", default=",".join(QUESTIONS), help=f"some of {', '.join(QUESTIONS)}, with commas")
    parser.add_argument("--pairs", type=int, default=3, help="of phases without and with the mirror (3)")
    parser.add_argument("--rounds", type=int, default=4, help="of each phase (4)")
    parser.add_argument("--inner-steps", type=int, default=40, help="of a round, beside a mirror in trouble (40)")
    parser.add_argument("--call-s", type=float, default=0.02, help="that a call of a stage takes at least (0.02)")
    parser.add_argument("--every-rounds", type=int, default=1, help="between checkpoints; 0: none (1)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs of all runs in this folder")
    arguments = parser.parse_args()
    troubles = arguments.troubles.split(",")
    if unknown := sorted(set(troubles) - set(QUESTIONS)):
        parser.error(f"no such trouble: {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    if reason := why_impossible():
        parser.error(reason)
    console = Console()
    directory = arguments.keep_logs or Path(tempfile.mkdtemp(prefix="mirrors-"))
    flags = (
        f"--diloco.inner-steps={arguments.inner_steps}",
        f"--emulation.call-s={arguments.call_s}",
        f"--param-mirror.every-rounds={arguments.every_rounds}",
    )
    results: list[Result] = []
    failures: list[str] = []
    try:
        for trouble in troubles:
            try:
                if trouble == CHECKPOINTS:
                    result = measure_checkpoints(arguments.pairs * arguments.rounds, directory)
                else:
                    result = measure(trouble, arguments.pairs, arguments.rounds, flags, directory / trouble)
            except (AssertionError, RunFailed) as error:
                failures.append(f"{trouble}: {error}")
                continue
            results.append(result)
            # A trouble takes minutes: what is known of it is said at once.
            console.print(table([result]))
            failures += [f"{trouble}: {problem}" for problem in result.problems]
            for line in dict.fromkeys(result.said):
                console.print(f"{trouble}: {line}", markup=False, highlight=False)
    finally:
        if not arguments.keep_logs:
            shutil.rmtree(directory, ignore_errors=True)
    console.print(table(results))
    for failure in failures:
        console.print(failure, style="red", markup=False, highlight=False)
    if arguments.json:
        content = {"cores": os.cpu_count(), "failures": failures, "troubles": list(map(asdict, results))}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    ended_by_signals(main)
