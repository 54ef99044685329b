"""The benchmark `startup`: what the sandbox's processes take, in seconds by cause and in memory by role.

Its reference is a swarm without a fork server: as many plain interpreters as there are roles, each of which imports
torch and hivemind for itself, all at the same time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.measure import Turns
from shoal_lab.bench.peers import PeerProcesses

_ROLES = {"monitor": 1, "client": 1, "data_server": 1, "server": 4, "trainer": 2}
"""The roles of the sandbox that the fork server forks, and how many processes each has."""
_NUM_ROLES = sum(_ROLES.values())
_SECONDS = {
    "first step, from the launch": "first_step",
    "of it, fork server has imported": "imports",
    "of it, monitor's DHT node is up": "monitor",
    "of it, servers have their stage": "stages",
    "of it, client leads": "leading",
    "of it, trainers are up": "trainers",
    "of it, first step is committed": "step",
}
"""Names of cases, and what the peer calls them. Those from the second on follow each other and add up to the first."""


@contextmanager
def open_cases(options: BenchmarkOptions) -> Generator[Sequence[Case], None, None]:
    """Start the process that starts sandboxes and interpreters; each repetition is one run, which all cases read."""
    with PeerProcesses("shoal_lab.bench.startup_peer:main", 1) as peers:
        sandbox = Turns(lambda: peers.call("sandbox", list(_ROLES))[0])
        interpreters = Turns(lambda: peers.call("interpreters", _NUM_ROLES)[0])
        plural = f"{_NUM_ROLES} interpreters"

        def seconds(name: str, key: str, reference: str | None = None) -> Case:
            theirs = None if reference is None else interpreters.reader(reference)
            return Case(name, "s", sandbox.reader(key), theirs)

        def memory(name: str, key: str, reference: str | None = None) -> Case:
            theirs = None if reference is None else interpreters.reader(reference)
            return Case(f"{name} PSS", "MB", sandbox.reader(key), theirs)

        others = ("launcher", "fork_server", "p2pd", *(("wandb",) if find_spec("wandb") else ()))
        yield [
            seconds(f"{plural} import", "imports", "seconds"),
            memory(plural, "roles_mb", "all_mb"),
            *(memory(f"interpreter {role}", f"{role}_mb", "each_mb") for role in _ROLES),
            *(memory(name.replace("_", " "), f"{name}_mb") for name in others),
            memory("all processes", "all_mb"),
            Case("all processes", "processes", sandbox.reader("processes"), None),
            *(seconds(name, key) for name, key in _SECONDS.items()),
        ]
