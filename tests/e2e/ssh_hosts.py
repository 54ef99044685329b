"""Hosts that are reached by ssh alone: each a network namespace with an sshd, and a home directory with nothing in it.

They share files and processes' numbers with this machine, and its passwd: what tells them apart is the command that
sshd has every session run, with an environment of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.launched import END_S, until
from tests.e2e.namespaces import Lan

from shoal.runtime.process_control import end_tagged

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_TAG = "TEST_SSH_HOSTS"
_SSHD_CONFIG = """
HostKey {keys}/{host}
AuthorizedKeysFile {keys}/operator.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
ForceCommand {directory}/{host}.sh
"""
_CLIENT_CONFIG = """
Host *
  User root
  IdentityFile {keys}/operator
  IdentitiesOnly yes
  UserKnownHostsFile {keys}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def why_no_sshd() -> str | None:
    """Return why this machine cannot be reached by ssh, or None."""
    return None if Path(SSHD).exists() else "hosts that are reached by ssh need openssh-server"


@dataclass
class SshHosts:
    """Machines of a network, of which each has an sshd.

    Attributes:
        directory: an empty one: homes, keys and what sshd says.
        environment: of every session, beside home and path.
    """

    directory: Path
    lan: Lan
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    _sshds: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def ssh_command(self) -> str:
        """What `ssh_command` of a hosts file is."""
        return f"ssh -F {self.directory}/ssh_config"

    @property
    def tag(self) -> dict[str, str]:
        """What is in the environment of every session, and by which all that they have left is ended."""
        return {_TAG: self.lan.tag}

    @property
    def _keys(self) -> Path:
        return self.directory / "keys"

    def home(self, host: str) -> Path:
        """Return the home directory on a host."""
        return self.directory / host

    def prepare(self) -> None:
        """Make keys, homes and configurations."""
        self._keys.mkdir(mode=0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("operator", *self.lan.hosts):
            self.make_key(name)
        self.know_hosts()
        (self.directory / "ssh_config").write_text(
            _CLIENT_CONFIG.format(keys=self._keys)
            + "".join(f"Host {host}\n  HostName {self.lan.address(host)}\n" for host in self.lan.hosts)
        )

    def make_key(self, name: str) -> None:
        """Make the key of a host, or of who reaches it, anew."""
        path = self._keys / name
        path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], input=b"y\n", check=True)

    def know_hosts(self, wrongly: str = "") -> None:
        """Let the operator know the keys of all hosts; of one of them another key than it has."""
        keys = {host: "operator" if host == wrongly else host for host in self.lan.hosts}
        lines = [f"{self.lan.address(host)} {(self._keys / f'{key}.pub').read_text()}" for host, key in keys.items()]
        (self._keys / "known_hosts").write_text("".join(lines))

    @contextlib.contextmanager
    def sshd(self, host: str) -> Iterator[None]:
        """Have a host's sshd run; sessions and what they have left end with it."""
        home = self.home(host)
        home.mkdir(exist_ok=True)
        own = {
            "HOME": str(home),
            "PATH": f"{home}/bin:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": "/run/user",
            "USER": "root",
        }
        said = " ".join(f"'{name}={value}'" for name, value in (own | dict(self.environment)).items())
        session = self.directory / f"{host}.sh"
        session.write_text(
            f'#!/bin/sh\ncd "{home}"\nexec env -i {said} {_TAG}={self.lan.tag} sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        session.chmod(0o700)
        config = self.directory / f"{host}.sshd"
        config.write_text(_SSHD_CONFIG.format(keys=self._keys, host=host, directory=self.directory))
        with (self.directory / f"{host}.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    self.lan.namespace(host),
                    "sh",
                    "-c",
                    _OWN,
                    "sh",
                    SSHD,
                    "-D",
                    "-e",
                    "-f",
                    config,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._sshds[host] = process.pid
        try:
            until(lambda: b"Server listening" in (self.directory / f"{host}.log").read_bytes(), END_S, "an sshd")
            yield
        finally:
            process.terminate()
            process.wait()

    def put_program(self, host: str, name: str, script: str) -> None:
        """Let a host have a program of this name."""
        path = self.home(host) / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    @contextlib.contextmanager
    def full_disk(self, host: str) -> Iterator[None]:
        """Let a host's home be on a disk on which next to nothing is free."""
        there = ["nsenter", f"--mount=/proc/{self._sshds[host]}/ns/mnt"]
        subprocess.run([*there, "mount", "-t", "tmpfs", "-o", "size=16m", "none", self.home(host)], check=True)
        try:
            yield
        finally:
            subprocess.run([*there, "umount", "--lazy", self.home(host)], check=True)

    def let_nobody_in(self) -> None:
        """Let no host know the operator's key any more."""
        (self._keys / "operator.pub").write_text("")

    def end_all(self) -> None:
        """End what sessions of these hosts have left running."""
        end_tagged(f"{_TAG}={self.lan.tag}")


_OWN = 'mkdir -p /run/user && mount -t tmpfs -o mode=0700 none /run/user && exec "$@"'


@contextlib.contextmanager
def ssh_hosts(directory: Path, network: Lan, environment: Mapping[str, str] | None = None) -> Iterator[SshHosts]:
    """Give hosts whose sshd runs; nothing of them runs afterwards."""
    hosts = SshHosts(directory, network, environment or {})
    hosts.prepare()
    with contextlib.ExitStack() as stack:
        stack.callback(hosts.end_all)
        for host in network.hosts:
            stack.enter_context(hosts.sshd(host))
        yield hosts
