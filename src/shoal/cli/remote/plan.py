"""What a host needs so that it does its part: an installation, and units. Pure: of the file and what the host has."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shoal.cli.remote.container import ContainerImage
from shoal.cli.remote.hosts_file import HostEntry, HostsFile
from shoal.cli.remote.probe import HOME, INSTALLED, UNITS, HostFacts
from shoal.cli.remote.unit_messages import Unit
from shoal.cli.remote.units_there import NEWEST

FIRST_PYTHON: Final = (3, 11)
_ROOM_KB: Final = 2 * 1024 * 1024
_ROOM_FOR_GPUS_KB: Final = 8 * 1024 * 1024
"""Builds of torch for a GPU have its libraries with them."""
_MAX_AHEAD_S: Final = 10.0
"""Beyond, or soon beyond, no host of the swarm believes another."""
CONFIG_NAME: Final = "config.yaml"


@dataclass(frozen=True)
class Installation:
    """What is installed on every host.

    Attributes:
        requirement: as pip takes it; of a wheel that is sent, the name of its file.
        wheel: its bytes; None: the hosts get it themselves.
        flags: more of them, for what installs.
    """

    requirement: str
    wheel: bytes | None
    extras: tuple[str, ...]
    flags: tuple[str, ...] = ()

    def name_for(self, entry: HostEntry) -> str:
        """Return the name of the folder of this installation, on such a host: another one where anything differs."""
        parts = (self.requirement, *self.extras, *self.flags, entry.python, str(entry.system_site_packages))
        digest = hashlib.sha256("\0".join(parts).encode() + (self.wheel or b""))
        return digest.hexdigest()[:12]

    def is_there(self, entry: HostEntry, facts: HostFacts) -> bool:
        """Whether such a host has it."""
        return self.name_for(entry) in facts.installed

    def python(self, entry: HostEntry, facts: HostFacts) -> str:
        """Return the path of its interpreter."""
        return f"{facts.home}/{INSTALLED}/{self.name_for(entry)}/bin/python"

    def argv(self, entry: HostEntry, facts: HostFacts, unit: str, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return what a unit runs, for a command of shoal."""
        return (self.python(entry, facts), "-m", "shoal", *words)

    def once(self, entry: HostEntry, facts: HostFacts, words: str) -> str:
        """Return what has a shell run a command of shoal that ends by itself, with the shell's standard input."""
        return f"exec {shlex.quote(self.python(entry, facts))} -m shoal {words}"

    def beside(self, unit: str, words: str) -> str:
        """Return what has a shell run a command of shoal where a unit runs, whatever installation that has."""
        return f'{NEWEST}cd "$HOME/{UNITS}/{unit}" && exec "$newest"bin/python -m shoal {words}'

    def told(self, facts: HostFacts) -> str:
        """Return what bringing it there is, in words."""
        return f"installs {self.requirement} for {facts.python}"

    def wheel_folder(self, entry: HostEntry) -> str:
        """Where the wheel is put, below the home directory, until it is installed."""
        return f"{HOME}/wheels/{self.name_for(entry)}"

    def wheel_path(self, entry: HostEntry) -> str:
        """Return the path of the wheel, below the home directory."""
        return f"{self.wheel_folder(entry)}/{self.requirement}"

    def script(self, entry: HostEntry, facts: HostFacts) -> str:
        """Return the shell commands that install it; the folder is whole, or is not said to be."""
        folder = f"{facts.home}/{INSTALLED}/{self.name_for(entry)}"
        python, path = shlex.quote(f"{folder}/bin/python"), shlex.quote(folder)
        what = self.requirement if self.wheel is None else f"{facts.home}/{self.wheel_path(entry)}"
        flags = "".join(f"{shlex.quote(flag)} " for flag in self.flags)
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        what = f"shoal{extras} @ {what}" if "://" in what else f"{what}{extras}"
        sees = "--system-site-packages " if entry.system_site_packages else ""
        if facts.uv:
            uv = shlex.quote(facts.uv)
            make = f"{uv} venv --quiet {sees}--python {shlex.quote(facts.python)} {path}"
            fill = f"{uv} pip install --quiet --python {python} {flags}{shlex.quote(what)}"
        else:
            make = f"{shlex.quote(facts.python)} -m venv {sees}{path}"
            fill = f"{python} -m pip install --quiet --disable-pip-version-check {flags}{shlex.quote(what)}"
        sent = shlex.quote(f"{facts.home}/{self.wheel_folder(entry)}")
        lock = shlex.quote(f"{facts.home}/{HOME}/lock")
        # Whoever waits for another one that installs the same finds it whole.
        lines = (
            "set -e",
            "umask 077",
            f"mkdir -p {shlex.quote(f'{facts.home}/{INSTALLED}')}",
            f"exec 9> {lock}",
            "if command -v flock > /dev/null; then flock 9; fi",
            f"if [ -e {path}/whole ]; then exit 0; fi",
            f"rm -rf {path}",
            make,
            fill,
            f"rm -rf {sent}",
            f"{python} -m shoal --version",
            f"touch {path}/whole",
        )
        return "".join(f"{line}\n" for line in lines)

    def problems(self, entry: HostEntry, facts: HostFacts) -> Iterator[str]:
        """Yield why it cannot be brought there, with what to do about it."""
        if not self.is_there(entry, facts):
            yield from _installation_problems(entry, facts)


def problems_of(entry: HostEntry, facts: HostFacts, installation: Installation | ContainerImage) -> Iterator[str]:
    """Yield why a host cannot take part, with what to do about it."""
    if not facts.is_writable:
        yield f"{facts.home}/{HOME} cannot be written: give the user a home directory that can"
    yield from installation.problems(entry, facts)
    if abs(facts.ahead_s) > _MAX_AHEAD_S:
        way = "ahead of" if facts.ahead_s > 0 else "behind"
        yield f"its clock is {abs(facts.ahead_s):.0f} s {way} this machine's: set both, best by NTP"
    if (entry.device or "").startswith("cuda") and not facts.gpus:
        yield f"device {entry.device}: nvidia-smi finds no GPU there: install its driver, or take device: cpu"


def _installation_problems(entry: HostEntry, facts: HostFacts) -> Iterator[str]:
    least = ".".join(map(str, FIRST_PYTHON))
    if not facts.python:
        yield f"there is no {entry.python}: install Python {least} or newer, or say where it is (python: /path/to/it)"
    elif _numbers(facts.python_version) < FIRST_PYTHON:
        yield (
            f"{facts.python} is Python {facts.python_version or '(it does not say)'}, and {least} or newer is needed: "
            "install one and name it (python: python3.11)"
        )
    elif not facts.has_venv and not facts.uv:
        yield f"{facts.python} cannot make environments: `sudo apt install python3-venv` there, or install uv"
    room_kb = _ROOM_FOR_GPUS_KB if facts.gpus else _ROOM_KB
    if facts.free_kb < room_kb:
        yield (
            f"{facts.free_kb / 1024 / 1024:.1f} GiB are free in {facts.home}, and an installation takes "
            f"{room_kb // 1024 // 1024}: free space there"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else ()


def client_name(prefix: str) -> str:
    """Return the name of the client's unit."""
    return f"{prefix}-client"


def servers_name(prefix: str) -> str:
    """Return the name of the unit of a host's servers."""
    return f"{prefix}-servers"


@dataclass(frozen=True)
class Wanted:
    """What the whole swarm is, as far as a unit has to know."""

    file: HostsFile
    prefix: str
    config_text: str
    installation: Installation | ContainerImage

    def client(self, name: str, facts: HostFacts) -> Unit | None:
        """Return the client's unit; None: this host has none."""
        if name != self.file.swarm.client:
            return None
        argv = ("start-trainer-client", "--config-path", CONFIG_NAME, "--num-servers", str(self.file.num_servers))
        argv = (*argv, *self._address(name), *self.file.swarm.flags)
        unit = client_name(self.prefix)
        return Unit(unit, self._argv(name, facts, unit, argv), {CONFIG_NAME: self.config_text})

    def servers(self, name: str, facts: HostFacts) -> Unit | None:
        """Return the unit of a host's servers, which join by an invitation; None: it has none."""
        entry = self.file.hosts[name]
        if not entry.servers:
            return None
        argv = (
            "join",
            "--experiment-prefix",
            self.prefix,
            "--num-servers",
            str(entry.servers),
            *self._address(name),
            *entry.flags,
        )
        argv += ("--device", entry.device) if entry.device else ()
        argv += ("--servers.max-memory-bytes", entry.max_memory) if entry.max_memory else ()
        unit = servers_name(self.prefix)
        return Unit(unit, self._argv(name, facts, unit, argv), is_lasting=True)

    def python(self, name: str, facts: HostFacts) -> str:
        """Return the path of the installation's interpreter; empty: there is an image."""
        if isinstance(self.installation, ContainerImage):
            return ""
        return self.installation.python(self.file.hosts[name], facts)

    def _address(self, name: str) -> tuple[str, ...]:
        public_ip = self.file.hosts[name].public_ip
        return ("--host-name", name, *(("--public-ip", public_ip) if public_ip else ()))

    def _argv(self, name: str, facts: HostFacts, unit: str, words: tuple[str, ...]) -> tuple[str, ...]:
        return self.installation.argv(self.file.hosts[name], facts, unit, words)
