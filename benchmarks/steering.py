#!/usr/bin/env python3
"""Measure how fast a run obeys: `shoal pause`, `resume-run`, `checkpoint` and `stop`, from its host and from another.

    python benchmarks/steering.py                                  about three minutes, and ten of a pause
    python benchmarks/steering.py --repeat 2 --pause-s 0 --json steering.json

A client's host, two hosts of two servers each and an operator's host, each in a network namespace (needs root), train a
model of two stages. Each command is given several times, in turns from the client's host and from the operator's, which
has the swarm's key. Measured:

    command   seconds from its start to its end, the start of its interpreter included
    obeyed    seconds from the line of the client's log that says that the order has come to what was wanted: the last
              step that is committed before the run stands, or the first that is committed afterwards. A checkpoint is
              of the next record, and is looked at for that.

Then a deterministic run is paused for `--pause-s`, and compared with its twin that is not: no process has ended, and
the hashes of all rounds are equal.

Exit code: 0 if a command takes at most 1.5 s on the host of the client and 6 s on another (medians), is always obeyed
within 0.5 s and the longest step, and the paused run is its twin's equal; else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.resume_points import hashes_in
from benchmarks.signals import ended_by_signals
from tests.e2e.hosts import Hosts, hosts_of, start_two_server_hosts
from tests.e2e.launched import END_S, SMALL, START_S, Launched, launched, until
from tests.e2e.namespaces import lan, why_impossible

from shoal.errors import RunFailed
from shoal_lab.event_log import time_of
from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole

NUM_SLOTS = 2
FLAGS = (
    "--no-wandb",
    "--log-level=debug",
    "--data.holdout-fraction=0.02",
    "--diloco.inner-steps=40",
    "--diloco.outer-steps=100000",
    "--param-mirror.every-rounds=0",
    "--param-mirror.every-s=1e6",
)
STANDS_S = 3.0
"""A pause lasts as long before it is looked at: what came after it has been written by then."""
EVENTS = {
    "pause": "run.paused",
    "resume-run": "run.resumed",
    "checkpoint": "checkpoint.asked",
    "stop": "run.stopped",
}
"""What the client's log says when an order has come."""
ROLES = ("client:0", "monitor:0", "mirror:0", "data_server:0", "server:0", "server:1", "trainer:0", "trainer:1")
MOST_S = {"client": 1.5, "operator": 6.0}
SLACK_S = 0.5


@dataclass
class Order:
    """One command, given several times from one host.

    Attributes:
        command_s: for each time, how long the command took.
        obeyed_s: for each time, from the order's arrival to what was wanted.
    """

    word: str
    host: str
    command_s: list[float] = field(default_factory=list)
    obeyed_s: list[float] = field(default_factory=list)


@dataclass
class Operators:
    """A run that trains, and hosts to steer it from."""

    hosts: Hosts
    swarm: Swarm
    peers: str
    orders: dict[tuple[str, str], Order] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def give(self, word: str, host: str) -> tuple[Order, float]:
        """Give a command; returns how it fared so far, and when the client heard it."""
        begun_s = time.time()
        shoal(word, *self.where(host), self.hosts.shared_path)
        order = self.orders.setdefault((word, host), Order(word, host))
        order.command_s.append(time.time() - begun_s)
        [heard] = self.swarm.events("client_0", EVENTS[word], begun_s)
        return order, time_of(heard)

    def where(self, host: str) -> tuple[Sequence[str], Path, Sequence[str]]:
        """Return what runs a command on a host, its home, and the flags that it needs there."""
        assert self.hosts.lan is not None
        home = self.hosts.home(host)
        if host == "client":
            # Where the run's own note is seen, in the directory that a host has for itself.
            return ("nsenter", f"--target={self.swarm.client.process.pid}", "--mount", "--net"), home, ()
        return self.hosts.lan.prefix(host), home, (self.peers,)

    def steps_after(self, at_s: float) -> list[float]:
        """When steps were committed after that."""
        return sorted(step.at_s for step in self.swarm.steps_between(at_s, float("inf")))

    def longest_step_s(self) -> float:
        """The longest time between two steps of one trainer within the last 10 s."""
        since_s = time.time() - 10.0
        times = [[step.at_s for step in self.swarm.steps(slot) if step.at_s > since_s] for slot in range(NUM_SLOTS)]
        return max(two - one for each in times for one, two in pairwise(each))

    def pause_and_resume(self, host: str) -> None:
        """Pause the run, see when its last step was, let it go on, see when its next one is."""
        order, heard_s = self.give("pause", host)
        time.sleep(STANDS_S)
        order.obeyed_s.append(max([each - heard_s for each in self.steps_after(heard_s)], default=0.0))
        order, heard_s = self.give("resume-run", host)
        first_s = until(lambda: self.steps_after(heard_s)[:1], START_S, "the next step")[0]
        order.obeyed_s.append(first_s - heard_s)

    def checkpoint(self, host: str) -> None:
        """Want a checkpoint, and see that it is of the record that came next."""
        before = self.swarm.num_records()
        _, heard_s = self.give("checkpoint", host)
        recorded = until(lambda: self.swarm.events("client_0", "round.recorded", heard_s), START_S, "the next record")
        written = until(lambda: self.swarm.events("mirror_0", "checkpoint.written", heard_s), START_S, "a checkpoint")
        if written[0]["round"] != recorded[0]["round"]:
            self.problems.append(f"a checkpoint after {before} records is of round {written[0]['round']}")

    def stop(self, host: str) -> None:
        """End the run, and see when its last step was."""
        order, heard_s = self.give("stop", host)
        for each in self.swarm.hosts:
            each.ends(END_S)
        order.obeyed_s.append(max([each - heard_s for each in self.steps_after(heard_s)], default=0.0))


def steered(directory: Path, repeat: int, call_s: float) -> tuple[list[Order], list[str]]:
    """Steer a run from two hosts until it is stopped; returns what each order took, and what is wrong."""
    with lan("client", "left", "right", "operator") as network, hosts_of(directory, network) as hosts:
        swarm, variable = start_two_server_hosts(hosts, (*FLAGS, f"--emulation.call-s={call_s}"), NUM_SLOTS)
        hosts.give_key("client", "operator")
        operators = Operators(hosts, swarm, f"--initial-peers={variable['INITIAL_PEERS']}")
        swarm.client.saw("mirror_0", "checkpoint.written", 2 * START_S)  # the first one is due unasked
        time.sleep(STANDS_S)
        limit_s = SLACK_S + operators.longest_step_s()
        for _ in range(repeat):
            for host in MOST_S:
                operators.pause_and_resume(host)
                operators.checkpoint(host)
        operators.stop("operator")
        require_whole(swarm)
        orders = list(operators.orders.values())
        return orders, operators.problems + [problem for order in orders for problem in too_slow(order, limit_s)]


def too_slow(order: Order, limit_s: float) -> list[str]:
    """Return what of an order takes longer than it may."""
    problems: list[str] = []
    if (median_s := statistics.median(order.command_s)) > MOST_S[order.host]:
        problems.append(f"shoal {order.word} takes {median_s:.2f} s on {order.host}, at most {MOST_S[order.host]} s")
    if (longest_s := max(order.obeyed_s, default=0.0)) > limit_s:
        problems.append(f"shoal {order.word} is obeyed after {longest_s:.2f} s, at most {limit_s:.2f} s")
    return problems


def paused(directory: Path, pause_s: float) -> list[str]:
    """Pause a deterministic run for long, and compare it with its twin."""
    flags = (*SMALL, "--diloco.outer-steps=6", "--emulation.call-s=0.05")
    kept: list[object] = []
    problems: list[str] = []
    for name in ("twin", "paused"):
        with launched(directory / name, *flags) as run:
            run.saw("client_0", "round.recorded")
            if name == "paused":
                shoal("pause", (), Path.home(), (), run.runtime_dir)
                before = processes(run)
                time.sleep(pause_s)
                problems += [f"{each} has ended in the pause" for each in sorted(before - processes(run))]
                shoal("resume-run", (), Path.home(), (), run.runtime_dir)
            if (code := run.ends(START_S + END_S)) != 0:
                problems.append(f"the run ended with {code}: {run.output}")
            kept.append(hashes_in(run.require_log_dir()))
    if kept[0] != kept[1]:
        problems.append("the hashes of the run that was paused are not those of its twin")
    return problems


def processes(run: Launched) -> set[int]:
    """The processes of a run that are no passing helpers: roles, and what launches them."""
    return {run.process.pid, run.fork_server(), *(run.living_pid_of(role) for role in ROLES)}


def shoal(word: str, prefix: Sequence[str], home: Path, flags: Sequence[str], runtime_dir: Path) -> None:
    """Run a command on a host."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "shoal", word, *flags],
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime_dir), "HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    if done.returncode != 0:
        raise RunFailed(f"shoal {word} ended with {done.returncode}: {done.stdout}")


def table(orders: Sequence[Order]) -> Table:
    """Return what a reader wants to see."""
    shown = Table(title="How fast a run obeys: medians, and the longest")
    for column in ("command", "from", "times", "command", "longest", "obeyed after", "longest"):
        shown.add_column(column, justify="left" if column in ("from",) else "right")

    def seconds(of: Callable[[Sequence[float]], float], each: Sequence[float]) -> str:
        return f"{of(each):.2f} s" if each else "next record"

    for order in orders:
        shown.add_row(
            f"shoal {order.word}",
            order.host,
            str(len(order.command_s)),
            seconds(statistics.median, order.command_s),
            seconds(max, order.command_s),
            seconds(statistics.median, order.obeyed_s),
            seconds(max, order.obeyed_s),
        )
    return shown


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="of each command from each host (5)")
    parser.add_argument("--call-s", type=float, default=0.02, help="that a call of a stage takes at least (0.02)")
    parser.add_argument("--pause-s", type=float, default=600.0, help="that the deterministic run is paused; 0: not")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    if reason := why_impossible():
        parser.error(reason)
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="steer-"))
    try:
        orders, problems = steered(directory / "hosts", arguments.repeat, arguments.call_s)
        console.print(table(orders))
        if arguments.pause_s:
            problems += paused(directory / "long", arguments.pause_s)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    if arguments.json:
        content = {"problems": problems, "orders": list(map(asdict, orders))}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    ended_by_signals(main)
