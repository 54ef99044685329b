"""The file that says which machines a swarm has, and what each is to run. What is wrong in it is said all at once."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast

from pydantic import BeforeValidator, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from shoal.cli.arguments import SANDBOX, found
from shoal.config.base import NonNegativeInt, PositiveInt, Section
from shoal.config.keys import nearest
from shoal.config.load import load_with_origins, reason_of
from shoal.config.schema import Config
from shoal.config.sources import read_file
from shoal.errors import ConfigError
from shoal.ids import HOST_NAME_PATTERN

OWN_VERSION: Final = "wheel"
"""Of `install`: what runs here is sent to the hosts."""
_SECRET: Final = re.compile(r"https?://[^/@\s]+@|://[^/@:\s]*:[^/@\s]+@")
"""A user of HTTP may be a token by itself, as GitHub's are; one of ssh is none, unless a password stands with it."""
_NO_DESTINATION: Final = re.compile(r"^-|\s")


def _split_words(value: object) -> object:
    """Take flags as a shell does: a list, or one text."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


Arguments = Annotated[tuple[str, ...], BeforeValidator(_split_words)]


class HostEntry(Section):
    """One machine."""

    ssh: str | None = Field(default=None, description="Where ssh goes, as on its command line; null: the host's name.")
    servers: NonNegativeInt = Field(default=1, description="Servers on this host; 0: none.")
    device: str | None = Field(default=None, description="As for --device: auto, cpu, cuda:0, ...")
    public_ip: str | None = Field(default=None, description="As for --public-ip.")
    max_memory: str | None = Field(default=None, description="As for --servers.max-memory-bytes: 8GiB.")
    flags: Arguments = Field(default=(), description="More flags of its servers: '--network.data-port 50001'.")
    python: str = Field(default="python3", description="The interpreter that the installation is made with.")
    system_site_packages: bool = Field(
        default=False, description="Let the installation see the interpreter's own packages, as torch on a Jetson."
    )

    @field_validator("ssh", "python")
    @classmethod
    def _check_word(cls, value: str | None) -> str | None:
        if value is not None and (not value or _NO_DESTINATION.search(value)):
            raise ValueError("must be one word that does not begin with a dash")
        return value


class SwarmEntry(Section):
    """What is trained, and where its client runs."""

    client: str = Field(description="Which of the hosts runs the client; it needs an address that all others reach.")
    config: Path | None = Field(default=None, description="The configuration, beside this file; null: sandbox.yaml.")
    flags: Arguments = Field(default=(), description="Flags of the client: '--diloco.outer-steps 100'.")


class HostsFile(Section):
    """The whole file."""

    swarm: SwarmEntry
    hosts: dict[str, HostEntry] = Field(min_length=1)
    install: str = Field(
        default=OWN_VERSION,
        description="What is installed: wheel (the version that runs here), a path of a wheel, or what pip takes, such "
        "as git+https://... .",
    )
    image: str | None = Field(
        default=None,
        description="In place of an installation: an image that has shoal, run by podman or docker, such as "
        "ghcr.io/you/shoal:1.2.",
    )
    extras: Arguments = Field(default=(), description="Extras that are installed with it, such as hf.")
    pip_flags: Arguments = Field(
        default=(),
        description="More flags of pip (or uv pip) install: '--extra-index-url https://...' for a CPU's torch.",
    )
    ssh_command: Annotated[Arguments, Field(min_length=1)] = Field(
        default=("ssh",), description="The ssh that is called, such as 'ssh -F swarm.ssh'."
    )
    parallel: PositiveInt = Field(default=16, description="At most so many hosts are looked after at a time.")

    @field_validator("image")
    @classmethod
    def _check_image(cls, value: str | None) -> str | None:
        if value is not None and (not value or _NO_DESTINATION.search(value)):
            raise ValueError("must be the name of an image: ghcr.io/you/shoal:1.2")
        return value

    @property
    def num_servers(self) -> int:
        """How many servers all hosts have."""
        return sum(host.servers for host in self.hosts.values())

    def destinations(self, names: Collection[str]) -> dict[str, str]:
        """Return where ssh goes for each of these hosts, in the file's order."""
        return {name: entry.ssh or name for name, entry in self.hosts.items() if name in names}


def read_hosts(path: Path) -> HostsFile:
    """Return what the file says; paths in it are beside it. The configuration that it names is not looked at.

    Raises:
        ConfigError: it cannot be read, or something in it is wrong: a line for each such thing.
    """
    values = read_file(path)
    hosts = values.get("hosts")
    if isinstance(hosts, dict):
        # `box2:` with nothing below it is a host with all defaults.
        entries = cast(dict[object, object], hosts)
        filled: dict[object, object] = {name: entry or {} for name, entry in entries.items()}
        values = {**values, "hosts": filled}
    try:
        file = HostsFile.model_validate(values)
    except ValidationError as error:
        problems = [_line(path, detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None
    problems = [*_problems(file)]
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    if file.install.endswith(".whl") and "://" not in file.install:
        file = file.model_copy(update={"install": str(path.parent / Path(file.install).expanduser())})
    if file.swarm.config is None:
        return file
    config = path.parent / file.swarm.config.expanduser()
    return file.model_copy(update={"swarm": file.swarm.model_copy(update={"config": config})})


@dataclass(frozen=True)
class DescribedSwarm:
    """What a file of hosts describes: the machines, and the run of their client.

    Attributes:
        config_path: the configuration that the client is started with.
        config: what that says with the client's flags.
    """

    hosts: HostsFile
    config_path: Path
    config: Config

    @property
    def prefix(self) -> str:
        """The name of the run, and the beginning of those of its units."""
        return self.config.experiment_prefix


def read_swarm(path: Path) -> DescribedSwarm:
    """Return what the file says, and its client's configuration: here rather than on the host, where whoever has made a
    mistake in it would have to look for it.

    Raises:
        ConfigError: as `read_hosts` does; or the configuration does not hold.
    """
    hosts = read_hosts(path)
    config_path = found(hosts.swarm.config or SANDBOX)
    return DescribedSwarm(hosts, config_path, load_with_origins(config_path, hosts.swarm.flags, {})[0])


def _line(path: Path, detail: ErrorDetails) -> str:
    location = detail["loc"]
    match detail["type"]:
        case "extra_forbidden":
            message = f"there is no such key; {_advice(location)}"
        case "missing":
            message = "is missing"
        case _:
            message = reason_of(detail)
    return f"{path}: {'.'.join(map(str, location))}: {message[:1].lower()}{message[1:]}"


def _advice(location: Sequence[int | str]) -> str:
    """Say which key was meant, or which there are."""
    is_inner = len(location) > 1
    sections: Mapping[str, type[Section]] = {"swarm": SwarmEntry, "hosts": HostEntry} if is_inner else {}
    known = sections.get(str(location[0]), HostsFile).model_fields
    right = nearest(str(location[-1]), known)
    return f"did you mean {right}?" if right else f"there are {', '.join(known)}"


def _problems(file: HostsFile) -> Iterator[str]:
    for name in file.hosts:
        if not re.match(HOST_NAME_PATTERN, name):
            yield f"hosts.{name}: a name has up to 32 letters, digits, dots, dashes and underscores"
    if file.swarm.client not in file.hosts:
        yield f"swarm.client: {file.swarm.client} is none of the hosts: {', '.join(file.hosts)}"
    if not file.num_servers:
        yield "hosts: none has a server, so nobody would train: give one `servers: 1`"
    for key, words in (("install", (file.install,)), ("pip_flags", file.pip_flags)):
        if any(map(_SECRET.search, words)):
            yield (
                f"{key}: what stands before the @ of an address would be in the arguments of pip on each host, where "
                "every user can read it: put it into ~/.netrc or pip.conf there, take git+ssh://git@..., or fetch the "
                "wheel yourself and say `install: /path/to/it.whl`"
            )
    if file.image is not None:
        yield from _beside_an_image(file)
    targets: dict[str, str] = {}
    for name, entry in file.hosts.items():
        other = targets.setdefault(entry.ssh or name, name)
        if other != name:
            yield f"hosts.{name}.ssh: {entry.ssh or name} is that of {other} already; give that one more servers"


def _beside_an_image(file: HostsFile) -> Iterator[str]:
    """Yield what cannot be honoured where nothing is installed."""
    keys = [key for key in ("install", "extras", "pip_flags") if key in file.model_fields_set]
    for name, entry in file.hosts.items():
        keys += [f"hosts.{name}.{key}" for key in ("python", "system_site_packages") if key in entry.model_fields_set]
    for key in keys:
        yield f"{key}: an image has what it was built with: leave this out, or `image`"
