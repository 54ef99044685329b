"""Hosts that a program in place of ssh reaches: each a folder of this machine as its home, in which shoal is installed.

What looks after units there is the real one; in place of a client and of servers something runs that says a line and
sleeps, since who looks after hosts does not ask what they train.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shoal.cli.remote.hosts_file import DescribedSwarm, read_swarm
from shoal.cli.remote.orders import wanted_of
from shoal.cli.remote.probe import INSTALLED, UNITS
from shoal.control.swarm_status import ServerStatus, StageStatus, SwarmStatus

PREFIX = "herd"
_SSH = """
import os, socket, sys, threading
# As ssh does. Else what is started on a host would keep open what its starter reads until the end.
os.closerange(3, 1024)
directory = os.path.dirname(os.path.abspath(__file__))
host = sys.argv[sys.argv.index("--") + 1]
home = os.path.join(directory, host)
if "-O" in sys.argv:
    sys.exit(0)
if os.path.exists(os.path.join(directory, host + ".away")):
    sys.stderr.write("ssh: connect to host " + host + " port 22: Connection refused\\n")
    sys.exit(255)
if "-W" in sys.argv:
    name, port = sys.argv[sys.argv.index("-W") + 1].split(":")
    try:
        link = socket.create_connection((name, int(port)))
    except OSError:
        sys.exit(255)
    def away():
        while part := os.read(0, 65536):
            link.sendall(part)
    threading.Thread(target=away, daemon=True).start()
    while part := link.recv(65536):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
    os._exit(0)
path = os.path.join(home, "bin") + ":" + os.environ["PATH"]
os.chdir(home)
os.execve("/bin/sh", ["sh", "-c", sys.argv[-1]], {**os.environ, "HOME": home, "PATH": path})
"""
_PYTHON = """#!/bin/sh
case "$*" in
  *shoal.cli.remote.unit*) exec {python} "$@" ;;
  *--remember-only*) cat > "$HOME/invitation" ;;
  *" invite "*) echo shoal1:invitation ;;
  *" status "*) cat {status} ;;
  *" start-trainer-client "*)
    mkdir -p logs/run; date > logs/run/initial_peers.txt; echo "the client leads"; exec sleep 600 ;;
  *" join "*) echo "server 0 serves stage 0"; exec sleep 600 ;;
  *) exit 7 ;;
esac
"""


@dataclass
class StandInHosts:
    """Such hosts, and a file of them: the first one has the client.

    Attributes:
        directory: an empty one.
    """

    directory: Path
    names: tuple[str, ...] = ("desk", "box")

    def __post_init__(self) -> None:
        (self.directory / "ssh.py").write_text(_SSH)
        (self.directory / "own.yaml").write_text(f"experiment_prefix: {PREFIX}\nmodel_pipeline: {{stages: 1}}\n")
        replicas = tuple(
            ServerStatus(peer=str(each), name=f"server {each}", host="box", state="serving", held_round=0)
            for each in range(len(self.names))
        )
        status = SwarmStatus(
            experiment_prefix=PREFIX,
            run=f"{PREFIX}-1",
            state="training",
            steps=1,
            stages=(StageStatus(stage=0, replicas=replicas),),
        )
        (self.directory / "status.json").write_bytes(msgspec.json.encode(status) + b"\n")
        self.write()
        for name in self.names:
            self._install(name)

    @property
    def file(self) -> Path:
        """The file of hosts."""
        return self.directory / "hosts.yaml"

    def write(self, **entries: str) -> None:
        """Write the file, with more in the entries of some hosts."""
        hosts = ""
        for name in self.names:
            more = f", {entries[name]}" if name in entries else ""
            hosts += f"  {name}: {{python: {sys.executable}{more}}}\n"
        ssh = f"ssh_command: {sys.executable} {self.directory / 'ssh.py'}\ninstall: shoal==1.2\n"
        swarm = f"swarm: {{client: {self.names[0]}, config: own.yaml}}\n"
        self.file.write_text(f"{swarm}hosts:\n{hosts}{ssh}")

    def read(self) -> DescribedSwarm:
        """Return what the file says."""
        return read_swarm(self.file)

    def home(self, name: str) -> Path:
        """Return the home directory of a host."""
        return self.directory / name

    def client_logs(self) -> Path:
        """Return where the client leaves its runs."""
        return self.home(self.names[0]) / UNITS / f"{PREFIX}-client" / "logs"

    def put_program(self, name: str, program: str, script: str) -> None:
        """Let a host have a program of this name."""
        path = self.home(name) / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def leaves(self, name: str) -> None:
        """Let a host not be reached any more."""
        (self.directory / f"{name}.away").touch()

    def _install(self, name: str) -> None:
        swarm = self.read()
        folder = self.home(name) / INSTALLED / wanted_of(swarm).installation.name_for(swarm.hosts.hosts[name])
        (folder / "bin").mkdir(parents=True)
        (folder / "whole").touch()
        python = folder / "bin" / "python"
        python.write_text(_PYTHON.format(python=sys.executable, status=self.directory / "status.json"))
        python.chmod(0o755)
        self.put_program(name, "systemctl", "exit 1")  # this user may have one
