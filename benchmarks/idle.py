#!/usr/bin/env python3
"""Measure what a swarm that waits costs: four servers, a client and a monitor that wait for a server that never comes.

    python benchmarks/idle.py                                one minute, after one of rest
    python benchmarks/idle.py --seconds 20 --json idle.json

The model is cut into one stage more than there are servers, so nobody trains; everybody is connected, announced in the
registry, and sends heartbeats. Read from /proc at both ends of the measured time, for each process and with its p2pd:
seconds on a core (user and system), and how often its threads were woken.

Exit code: 0 if all of them together stay below 2 % of a core, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.hosts import hosts_of, invited
from tests.e2e.launched import START_S, Launched, until

from shoal.clock import SystemClock
from shoal.runtime.process_info import command_line, descendants, read_stat

NUM_SERVERS = 4
MAX_CORE_SHARE = 0.02
"""Of a core, for the whole swarm."""
SETTLE_S = 60.0
"""Between the last server's start and the measurement: the registry is read less often the longer nothing changes."""
FLAGS = ("--no-wandb", f"--model.num-layers={NUM_SERVERS + 1}", f"--model-pipeline.stages={NUM_SERVERS + 1}")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """By one process since its start: time on a core, in seconds, and how often its threads were woken."""

    core_s: float
    wakeups: int


def used(pid: int, thread: int | None = None) -> Used | None:
    """Read what a process has used, or one thread of it; None if it is gone."""
    of_thread = "*" if thread is None else str(thread)
    try:
        stat = Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
        fields = stat.read_text().rpartition(")")[2].split()
        tasks = list(Path(f"/proc/{pid}/task").glob(f"{of_thread}/status"))
        woken = sum(int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", t.read_text(), re.MULTILINE)[1]) for t in tasks)  # type: ignore[index]
    except OSError:
        return None
    return Used((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, woken)


def roles_of(launchers: Iterable[int]) -> dict[int, str]:
    """Return the name of each process of these commands; one that a role has started has the role's name as well."""
    names: dict[int, str] = {}
    for launcher in launchers:
        names[launcher] = "launcher"
        for stat in descendants(launcher):
            title = re.fullmatch(r"shoal:(\w+?)(?::(\d+))?", " ".join(command_line(stat.pid)))
            parent = names.get(stat.parent_pid, "")
            names[stat.pid] = title[1] if title else f"{parent.partition(' ')[0]} p2pd"
    return names


def measure(launchers: list[int], seconds: float) -> tuple[dict[str, Used], Counter[str]]:
    """Return what the processes of each kind use in so many seconds, and how many there are of each."""
    names = roles_of(launchers)
    before = {pid: used(pid) for pid in names}
    begun_s = SystemClock().now_s()
    threading.Event().wait(seconds)
    seconds = SystemClock().now_s() - begun_s
    total: dict[str, Used] = {}
    for pid, name in names.items():
        first, last, so_far = before[pid], used(pid), total.get(name, Used(0.0, 0))
        if first is not None and last is not None:
            core_s, wakeups = last.core_s - first.core_s, last.wakeups - first.wakeups
            total[name] = Used(so_far.core_s + core_s / seconds, so_far.wakeups + round(wakeups / seconds))
    return total, Counter(names.values())


def serving(servers: Launched) -> bool:
    """Whether all servers of the host have a stage."""
    return all(servers.events(f"server_{index}", "server.ready") for index in range(NUM_SERVERS))


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to look")
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="how long to wait before, in seconds")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--hold", action="store_true", help="print the process ids and wait for Enter before measuring")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="idle") as directory, hosts_of(Path(directory)) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *FLAGS, "--network.data-port=0")
        variables, [script, *flags] = invited(client)
        hosts.give_key("client", "servers")
        own = ("--num-servers", str(NUM_SERVERS), "--device", "cpu")
        servers = hosts.run(
            "servers", script, *_without(flags, "--num-servers", "--device"), *own, environment=variables
        )
        until(lambda: serving(servers), START_S, "all servers serve")
        threading.Event().wait(arguments.settle)
        launchers = [client.process.pid, servers.process.pid]
        if arguments.hold:
            console.print({pid: f"{name}: {read_stat(pid)}" for pid, name in roles_of(launchers).items()})
            sys.stdin.readline()
        total, counts = measure(launchers, arguments.seconds)
    table = Table("process", "number", "% of a core", "woken / s")
    for name, each in sorted(total.items()):
        table.add_row(name, str(counts[name]), f"{100 * each.core_s:.2f}", str(each.wakeups))
    everything = sum(each.core_s for each in total.values())
    of_servers = sum(total[name].core_s for name in ("server", "server p2pd") if name in total)
    table.add_row("servers in all", "", f"{100 * of_servers:.2f}", "")
    table.add_row("all", str(counts.total()), f"{100 * everything:.2f}", "")
    console.print(table)
    if arguments.json:
        figures = {name: {"core_share": each.core_s, "wakeups_per_s": each.wakeups} for name, each in total.items()}
        arguments.json.write_text(json.dumps({"servers": of_servers, "all": everything, "of": figures}, indent=2))
    return int(everything >= MAX_CORE_SHARE)


def _without(flags: list[str], *names: str) -> list[str]:
    """Leave out these flags and their values."""
    return [f for i, f in enumerate(flags) if f not in names and (i == 0 or flags[i - 1] not in names)]


if __name__ == "__main__":
    sys.exit(main())
