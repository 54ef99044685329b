#!/usr/bin/env python3
"""Attack a swarm through its DHT without its key, and compare what it trains with a time without the attack.

    python benchmarks/strangers.py --seconds 300 --json strangers.json

A client's host and a host of two servers are started as two commands on this machine. A stranger then asks their nodes
of the DHT what would end a process, or fill its memory (`tests/dht_stranger.py`). Another one, with which the nodes
speak since it shows the proofs of a member, stores and holds what can be made without the key: records of every kind
under the eight keys of small order and under its own, and the true ones that it reads from all holders, replayed, cut,
prolonged, signed again, and under other names and topics. The same run is measured for half as long before the attack
and for half as long after it. Exit code 1 if a role has ended, a run or configuration was left or taken, a reason was
not counted, or the samples per second fell below `--least` (0.95) of the undisturbed; an idle machine is needed for
that last verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults import FLAGS
from benchmarks.signals import ended_by_signals
from tests.e2e.hosts import end_whole, hosts_of, invited
from tests.e2e.launched import START_S, until
from tests.e2e.stranger import attacking, harm_done, processes_of

from shoal.errors import RunFailed
from shoal.identity import namespace
from shoal_lab.observed import Swarm

REASONS = ("bad_mac", "bad_expiry", "wrong_signer", "wrong_topic")
"""For which records are refused that a stranger can make."""
SETTLE_S = 10.0
"""Of training before anything is measured."""


@dataclass
class Result:
    """What an attack has done.

    Attributes:
        seconds: that it lasted.
        stored: records that the attacker has stored, by kind.
        refused: records that the roles have dropped, by reason.
        samples_per_s: before, during and after it.
        share: of the samples per second without it.
        problems: why the exit code is 1.
    """

    seconds: float
    stored: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    samples_per_s: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Attack, print, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="of the attack (300)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="between two rounds of all attacks (5)")
    parser.add_argument("--least", type=float, default=0.95, help="share of the undisturbed samples per second (0.95)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--keep-logs", type=Path, help="leave the logs in this folder")
    arguments = parser.parse_args()
    directory = arguments.keep_logs or Path(tempfile.mkdtemp(prefix="strangers-"))
    try:
        result = measure(directory, arguments.seconds, arguments.pause_s, arguments.least)
    finally:
        if not arguments.keep_logs:
            shutil.rmtree(directory, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"cores": os.cpu_count(), **asdict(result)}, indent=2) + "\n")
    show(result, Console())
    return 1 if result.problems else 0


def measure(directory: Path, seconds: float, pause_s: float, least: float) -> Result:
    """Run a swarm: undisturbed, attacked, undisturbed."""
    result = Result(seconds)
    try:
        with hosts_of(directory) as hosts:
            client = hosts.run("client", "start_trainer_client.py", *FLAGS, "--num-servers=2")
            variable, command = invited(client)
            hosts.give_key("client", "servers")
            shows = namespace(hosts.key("client"), "sandbox")
            # It takes part before the servers do: in a larger DHT only the nodes nearest to a topic are asked for it.
            with attacking(variable["INITIAL_PEERS"].split(","), pause_s, shows) as attack:
                servers = hosts.run("servers", *command, environment=variable)
                swarm = Swarm(client, [servers], 1)
                until(swarm.is_training, 2 * START_S, "training")
                time.sleep(SETTLE_S)
                result.samples_per_s["before"] = trained(swarm, seconds / 2)
                processes, begun_unix_s = processes_of(swarm.hosts), time.time()
                attack.begin()
                attack.had_enough()
                result.samples_per_s["attacked"] = trained(swarm, seconds)
                attack.end()
            result.stored = attack.stored
            result.problems += harm_done(swarm, processes, begun_unix_s)
            result.samples_per_s["after"] = trained(swarm, seconds / 2)
            end_whole(swarm)
            counters = client.summary()["counters"]
    except (AssertionError, RunFailed) as error:
        result.problems.append(str(error))
        return result
    name = "records.dropped{reason="
    result.refused = {key[len(name) : -1]: count for key, count in counters.items() if key.startswith(name)}
    result.problems += [f"nothing was refused as {reason}" for reason in REASONS if not result.refused.get(reason)]
    rates = result.samples_per_s
    result.share = rates["attacked"] / ((rates["before"] + rates["after"]) / 2)
    if result.share < least:
        result.problems.append(f"{result.share:.3f} of the undisturbed samples per second, at least {least} are wanted")
    return result


def trained(swarm: Swarm, seconds: float) -> float:
    """Let it train for so long, and return the samples per second of all trainers."""
    begun_unix_s = time.time()
    while (left_s := begun_unix_s + seconds - time.time()) > 0:
        for host in swarm.hosts:
            host.require_running()
        time.sleep(min(left_s, 1.0))
    ended_unix_s = time.time()
    steps = [step for slot in range(swarm.num_slots) for step in swarm.steps(slot)]
    samples = sum(step.samples for step in steps if begun_unix_s < step.at_s <= ended_unix_s)
    return samples / (ended_unix_s - begun_unix_s)


def show(result: Result, console: Console) -> None:
    """Print what a reader wants to see."""
    for title, counts in (("stored by the attacker", result.stored), ("refused by the swarm", result.refused)):
        console.print(f"[bold]{title}")
        for name, count in sorted(counts.items()):
            console.print(f"  {name}: {count}", highlight=False)
    console.print("[bold]samples per second")
    for name, rate in result.samples_per_s.items():
        console.print(f"  {name}: {rate:.1f}", highlight=False)
    console.print(f"  share of the undisturbed: {result.share:.3f}", highlight=False)
    for problem in result.problems:
        console.print(problem, style="red", markup=False)
    console.print("FAILED" if result.problems else "ok: no role ended, nothing forged was believed")


if __name__ == "__main__":
    ended_by_signals(main)
