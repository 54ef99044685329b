"""The commands on all hosts of one swarm: on one machine, or each host in a network namespace of its own."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.far_line import FarHosts
from tests.e2e.launched import END_S, PACE, START_S, Launched, launched, until
from tests.e2e.namespaces import Lan, lan

from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole


@dataclass
class Hosts:
    """The commands on all hosts of one swarm; with a `Lan` each runs in a namespace of its own."""

    directory: Path
    lan: Lan | FarHosts | None = None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.shared_path = Path(tempfile.mkdtemp(prefix="sh", dir="/tmp"))

    def run(
        self,
        host: str,
        *command: str,
        environment: Mapping[str, str] | None = None,
        start: str = "first",
        cold: bool = False,
    ) -> Launched:
        """Run a script on a host, with its own name, home and runtime directory; each start has its own logs."""
        home = self.home(host)
        own = {} if self.lan is None else {"prefix": self.lan.prefix(host), "runtime_dir": self.shared_path}
        if self.lan is not None:
            self.shared_path.mkdir(exist_ok=True)
        script, *flags = command
        of_host = {"SHOAL_NETWORK__HOST_NAME": host, "SHOAL_EMULATION__CALL_S": PACE}
        return self.stack.enter_context(
            launched(
                self.directory / host / start,
                *flags,
                command=(script,),
                cold=cold,
                environment={"HOME": str(home), **of_host, **(environment or {})},
                **own,
            )
        )

    def home(self, host: str) -> Path:
        """Return the home directory on a host."""
        home = self.directory / host / "home"
        home.mkdir(parents=True, exist_ok=True)
        return home

    def key(self, host: str) -> bytes:
        """Return the swarm's key that a host has."""
        return (self.home(host) / ".config/shoal/swarm.key").read_bytes()

    def give_key(self, sender: str, receiver: str) -> None:
        """Copy the swarm's key, as the printed line asks for."""
        target = self.home(receiver) / ".config/shoal/swarm.key"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.home(sender) / ".config/shoal/swarm.key", target)


@contextlib.contextmanager
def hosts_of(directory: Path, network: Lan | FarHosts | None = None) -> Iterator[Hosts]:
    """Give hosts; whatever runs on them at the end is ended."""
    hosts = Hosts(directory, network)
    try:
        with hosts.stack:
            yield hosts
    finally:
        shutil.rmtree(hosts.shared_path, ignore_errors=True)


@contextlib.contextmanager
def two_server_hosts(directory: Path, flags: Sequence[str], num_slots: int) -> Iterator[tuple[Swarm, Lan]]:
    """Give a swarm that trains on a client's host and two hosts of two servers each, and their network."""
    with lan("client", "left", "right") as network, hosts_of(directory, network) as hosts:
        yield start_two_server_hosts(hosts, flags, num_slots)[0], network


def start_two_server_hosts(hosts: Hosts, flags: Sequence[str], num_slots: int) -> tuple[Swarm, dict[str, str]]:
    """Have the hosts `client`, `left` and `right` train; returns the swarm, and the variable for hosts that join it."""
    client = hosts.run("client", "start_trainer_client.py", *flags, "--num-servers=4")
    variable, command = invited(client)
    for host in ("left", "right"):
        hosts.give_key("client", host)
    servers = [hosts.run(host, *command, environment=variable) for host in ("left", "right")]
    swarm = Swarm(client, servers, num_slots)
    until(swarm.is_training, 2 * START_S, "training")
    return swarm, variable


def end_whole(swarm: Swarm) -> None:
    """Interrupt a run; check that all hosts end well, leave nothing, and that nothing shows in what was trained."""
    swarm.client.interrupt()
    assert swarm.client.ends(END_S) == 130, swarm.client.output
    for host in swarm.server_hosts:
        assert host is swarm.client or host.ends(END_S) == 0, host.output
    for host in swarm.hosts:
        host.leaves_nothing()
    require_whole(swarm)


def invited(client: Launched) -> tuple[dict[str, str], list[str]]:
    """Return the variable and the command that the client's host has printed last for the others."""

    def lines() -> tuple[dict[str, str], list[str]] | None:
        assert client.process.poll() is None, client.output
        exports = re.findall(r"^export (\w+)=(\S+)$", client.output, re.MULTILINE)
        commands = re.findall(r"^python (start_servers\.py .*)$", client.output, re.MULTILINE)
        return (dict(exports[-1:]), shlex.split(commands[-1])) if exports and commands else None

    return until(lines, START_S, "the printed invitation")
