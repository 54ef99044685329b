"""Whoever brings a swarm up on machines that are reached by ssh: a file of all hosts, and the commands of shoal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.launched import END_S, ENDLESS, ROOT
from tests.e2e.namespaces import lan
from tests.e2e.ssh_hosts import SshHosts, ssh_hosts

MACHINES = ("one", "two", "three")
_FILE = """
swarm:
  client: one
  config: small.yaml
  flags: {flags}
hosts:
  one: {{servers: 1, python: {python}}}
  two: {{servers: 1, python: {python}}}
  three: {{servers: 1, python: {python}}}
ssh_command: {ssh_command}
"""


_ORDER = """
import json, sys, urllib.request as r
page, query, host, order = sys.argv[1:]
o = r.build_opener(r.HTTPCookieProcessor())
print(o.open(page + "?" + query).read().decode())
with o.open(page + "events") as events:
    print(events.read1(65536).decode())
token = json.load(o.open(page + "hosts"))["token"]
headers = {"Origin": page.rstrip("/"), "X-Shoal-Order": token}
assert o.open(r.Request(f"{page}hosts/{host}/{order}", method="POST", headers=headers)).status == 202
"""


@dataclass
class Operator:
    """Whoever has the file, on a machine that reaches all hosts.

    Attributes:
        python: with which the hosts make their installations.
        more: lines of the file.
        transcript: the commands, and all that they have said.
    """

    hosts: SshHosts
    file: Path
    python: str = sys.executable
    more: str = ""
    transcript: list[str] = field(default_factory=list[str])

    def shoal(self, *command: str) -> tuple[int, str]:
        """Run a command there; return its exit code and all that it says."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(self._argv(*command), check=False, **streams, **self._where())
        self.transcript += [f"$ shoal {' '.join(command)}", *done.stdout.splitlines()]
        return done.returncode, done.stdout

    def _argv(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.hosts.lan.namespace("desk"), sys.executable, "-m", "shoal", *command]

    def _where(self) -> dict[str, Any]:
        home = {"HOME": str(self.hosts.home("desk")), "PYTHONPATH": str(ROOT / "src")}
        return {"cwd": self.file.parent, "stdin": subprocess.DEVNULL, "env": os.environ | home}

    @contextlib.contextmanager
    def started(self, *command: str) -> Iterator[Callable[[], str]]:
        """Run a command there until the context is left; gives what returns all that it has said."""
        output = self.file.parent / "output"
        self.transcript.append(f"$ shoal {' '.join(command)}")
        with output.open("wb") as file:
            process = subprocess.Popen(self._argv(*command), stdout=file, stderr=file, **self._where())
        try:
            yield output.read_text
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(END_S) == 130, output.read_text()

    def fetched(self, address: str) -> str:
        """Return what is at an address of that machine, as a browser gets it: with the cookie that it is given."""
        script = (
            "import sys, urllib.request as r; "
            "o = r.build_opener(r.HTTPCookieProcessor()); print(o.open(sys.argv[1]).read().decode())"
        )
        command = ["ip", "netns", "exec", self.hosts.lan.namespace("desk"), sys.executable, "-c", script, address]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def ordered(self, page: str, query: str, host: str, order: str) -> str:
        """Give an order on the operator's page, as its own script does; return the page and the run's first news."""
        command = ["ip", "netns", "exec", self.hosts.lan.namespace("desk"), sys.executable, "-c", _ORDER]
        command += [page, query, host, order]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def write(self, **changes: str) -> None:
        """Write the file, with parts of it replaced."""
        text = _FILE.format(flags=list(ENDLESS), python=self.python, ssh_command=self.hosts.ssh_command)
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        self.file.write_text(text + self.more)


@contextlib.contextmanager
def operator_of(directory: Path, environment: Mapping[str, str], **options: str) -> Iterator[Operator]:
    """Give who has a file of three hosts; nothing that was brought up there runs afterwards.

    Args:
        directory: an empty one.
        environment: of every session on a host.
        options: `python` and `more` of the operator.
    """
    with (
        lan("desk", *MACHINES) as network,
        ssh_hosts(directory, network, {**environment, "OMP_NUM_THREADS": "1"}) as hosts,
    ):
        operator = Operator(hosts, directory / "desk" / "hosts.yaml", **options)
        (directory / "desk" / "small.yaml").write_text((ROOT / "configs/sandbox.yaml").read_text())
        operator.write()
        yield operator
