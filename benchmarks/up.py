#!/usr/bin/env python3
"""Measure how long it takes until three machines train: from nothing and installed by `shoal up`, and by invitation.

    pip wheel --wheel-dir wheels --constraint constraints.txt .
    python benchmarks/up.py --wheels wheels --json up.json

Each machine is a network namespace with an sshd and an empty home directory, on the cores and the disk of this one: of
what three installations take at once, a machine of one's own would take a third. The machines reach no index, so what
shoal needs is installed from the folder of wheels (`pip_flags: --no-index --find-links FOLDER`).

    nothing, pip    `shoal up` on clean homes, until the run trains
    nothing, uv     the same, where uv is installed here (`pip install uv`)
    installed       `shoal hosts down` and then `shoal up`
    by invite       `start_trainer_client.py --invite` on one machine, `shoal join` on two; all have shoal

The time is that from the beginning of the first command to the first step. Exit code 1 if one is over its limit.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.signals import ended_by_signals
from tests.e2e.hosts import hosts_of
from tests.e2e.launched import ENDLESS, START_S, until
from tests.e2e.namespaces import lan, why_impossible
from tests.e2e.operators import Operator, operator_of
from tests.e2e.ssh_hosts import why_no_sshd

from shoal.errors import RunFailed
from shoal_lab.observed import Swarm

FROM_NOTHING_S = 120.0
INSTALLED_S = 25.0
INVITED_S = 15.0


@dataclass(frozen=True)
class Case:
    """What one way has taken.

    Attributes:
        seconds: until the first step.
        limit_s: that it may take.
        installing_s: of these, until a host had its installation; one for each host.
    """

    name: str
    seconds: float
    limit_s: float
    installing_s: list[int] = field(default_factory=list)


def brought_up(operator: Operator, name: str, limit_s: float) -> Case:
    """Return what `shoal up` takes."""
    began_s = time.monotonic()
    code, said = operator.shoal("up")
    took_s = time.monotonic() - began_s
    if code:
        raise RunFailed(said)
    return Case(name, took_s, limit_s, [int(found) for found in re.findall(r"installed in (\d+) s", said)])


def from_nothing(installer: str, wheels: Path) -> Iterator[Case]:
    """Yield what three clean machines take, and what they take the next time."""
    directory = Path(tempfile.mkdtemp(prefix="up-"))
    more = f"pip_flags: --no-index --find-links {wheels.resolve()}\n"
    try:
        with operator_of(directory, {}, python=f"{sys.base_prefix}/bin/python3", more=more) as operator:
            if installer == "uv":
                for host in operator.hosts.lan.hosts:
                    operator.hosts.put_program(host, "uv", f'exec {shutil.which("uv")} "$@"')
            yield brought_up(operator, f"nothing, {installer}", FROM_NOTHING_S)
            operator.shoal("hosts", "down")
            yield brought_up(operator, f"installed, by {installer}", INSTALLED_S)
            operator.shoal("hosts", "down")
    finally:
        shutil.rmtree(directory)


def by_invite() -> Case:
    """Return what three commands take on three machines that have shoal."""
    with (
        tempfile.TemporaryDirectory(prefix="up-") as name,
        lan("desk", "box1", "box2") as network,
        hosts_of(Path(name), network) as hosts,
    ):
        began_s = time.monotonic()
        start = ("start_trainer_client.py", "--invite")
        client = hosts.run("desk", *start, *ENDLESS, "--num-servers=2", "--log-level=debug")
        text = until(lambda: re.search(r"^shoal1:\S+$", client.output, re.MULTILINE), START_S, "the invitation")
        given = Path(name) / "given"
        given.write_text(text[0])
        boxes = [hosts.run(box, "-m", "shoal", "join", f"--invitation={given}") for box in ("box1", "box2")]
        swarm = Swarm(client, boxes, num_slots=1)
        until(lambda: client.log_dir and swarm.steps(0), 2 * START_S, "a step")
        took_s = time.monotonic() - began_s
        client.interrupt()
        client.ends(START_S)
    return Case("by invite", took_s, INVITED_S)


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="the folder of wheels; without it only `by invite` is measured")
    parser.add_argument("--installers", default="pip,uv", help="which of pip and uv are tried (both)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments, console = parser.parse_args(), Console()
    if why := why_impossible() or why_no_sshd():
        parser.error(why)
    cases: list[Case] = []
    installers = arguments.installers.split(",") if arguments.wheels else []
    for installer in installers:
        if installer == "uv" and shutil.which("uv") is None:
            console.print("uv is not installed here: left out")
            continue
        for case in from_nothing(installer, arguments.wheels):
            cases.append(case)
            console.print(f"{case.name}: {case.seconds:.1f} s")
    cases.append(by_invite())
    table = Table("case", "first step after", "limit", "installing", box=None)
    for case in cases:
        installing = ", ".join(f"{each} s" for each in case.installing_s)
        table.add_row(case.name, f"{case.seconds:.1f} s", f"{case.limit_s:.0f} s", installing)
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(case) for case in cases], indent=1))
    return 1 if any(case.seconds > case.limit_s for case in cases) else 0


if __name__ == "__main__":
    ended_by_signals(main)
