"""Sections `network`, `health`, `servers`, `notify`, `dashboard` and `param_mirror`: addresses, deadlines and processes
of a host."""

import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shoal.config.base import ByteCount, ByteSize, NonNegativeInt, PositiveFloat, PositiveInt, Section, Words
from shoal.config.per_server import split_values
from shoal.ids import HOST_NAME_PATTERN

MAX_PORT: Final = 65535
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_MAX_HOST_NAME: Final = 32
Niceness = Annotated[int, Field(ge=0, le=19)]


class NetworkConfig(Section):
    """How the peers find each other."""

    initial_peers: Words = Field(
        default=(),
        description="Addresses of peers to join (/ip4/.../tcp/.../p2p/...): a list, a JSON list, text with commas or "
        "spaces, or @file. Empty: start a new swarm.",
    )
    host_maddrs: Words = Field(
        default=("/ip4/0.0.0.0/tcp/0",),
        description="Addresses to listen on for the DHT. Port 0 takes any free port; after a fixed one, the host's "
        "second role takes the next. A run on one machine listens on the loopback interface unless this is set.",
    )
    announce_maddrs: Words = Field(
        default=(),
        description="Addresses to tell other peers, where they differ (port forwarding); they need fixed ports.",
    )
    monitor_port: int = Field(
        default=0,
        ge=0,
        le=MAX_PORT,
        description="TCP port of the monitor, the first peer. 0: any free port, and where other hosts join 50000 if it "
        "is free.",
    )
    data_port: int = Field(
        default=0,
        ge=0,
        le=MAX_PORT,
        description="TCP port on which the client, or the first server of a host, listens for tensors of other hosts; "
        "further servers, and the mirror beside the client, take the next ones. 0 takes any free ports.",
    )
    announce_data_port: int = Field(
        default=0,
        ge=0,
        le=MAX_PORT,
        description="The port to tell other hosts in place of data_port, where a router forwards another one; further "
        "servers tell the next ones. Needs data_port and public_ip. 0: the port itself.",
    )
    lan: bool = Field(
        default=True,
        description="The client's host announces its run on the local network (mDNS), sealed with the swarm's key, and "
        "a host that joins looks for it there if it knows no initial peers.",
    )
    swarm_key_file: Path = Field(
        default=Path("~/.config/shoal/swarm.key"),
        description="File with the secret that all hosts of a swarm share; `shoal key new` makes one.",
    )
    public_ip: str | None = Field(
        default=None,
        description="Address or name under which other hosts reach this one; null: the addresses of its interfaces.",
    )
    host_name: str | None = Field(
        default=None,
        description="What this host is called in the messages and logs of all hosts, as in server 1@box2: up to 32 "
        "letters, digits, dots, dashes and underscores. null: the machine's own name, up to its first dot.",
    )
    max_upload_mbit: PositiveFloat | None = Field(
        default=None,
        description="Most that the processes of one command send to other hosts together, in millions of bits per "
        "second. Messages without tensors count and are not held back. null: no limit.",
    )
    bootstrap_timeout_s: PositiveFloat = Field(
        default=20.0, description="A peer that reaches none of its initial peers for so long gives up (exit code 2)."
    )

    @field_validator("initial_peers", "host_maddrs", "announce_maddrs")
    @classmethod
    def _check_multiaddrs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not address.startswith("/"):
                raise ValueError(f"{address!r} is not a multiaddress such as /ip4/203.0.113.7/tcp/50000/p2p/12D3Koo...")
            port = re.search(r"/(?:tcp|udp)/([^/]*)", address)
            if port is not None and not (port[1].isdecimal() and int(port[1]) <= MAX_PORT):
                raise ValueError(f"{port[1]!r} in {address!r} is not a port; use 0 to {MAX_PORT}")
        return value

    @field_validator("public_ip")
    @classmethod
    def _check_public_ip(cls, value: str | None) -> str | None:
        if not value:
            return None
        if (problem := _host_problem(value)) is not None:
            raise ValueError(f"{problem}; give one address or name under which other hosts reach this one")
        return value

    @field_validator("host_name")
    @classmethod
    def _check_host_name(cls, value: str | None) -> str | None:
        if value is not None and not re.match(HOST_NAME_PATTERN, value):
            raise ValueError(
                f"use 1 to {_MAX_HOST_NAME} letters, digits, dots, dashes and underscores, and begin with a letter or "
                "digit"
            )
        return value

    @property
    def shown_host_name(self) -> str:
        """`host_name`, with its default."""
        return self.host_name or cleaned_host_name(socket.gethostname())

    @model_validator(mode="after")
    def _check_announced_port(self) -> Self:
        lacking = [name for name in ("data_port", "public_ip") if not getattr(self, name)]
        if self.announce_data_port and lacking:
            raise ValueError(
                f"network.announce_data_port = {self.announce_data_port} is the port that a router forwards to "
                f"network.data_port: set {' and '.join('network.' + name for name in lacking)} as well"
            )
        return self


def cleaned_host_name(name: str) -> str:
    """Return the part of a machine's name before the first dot, with a dash for each character that is not shown."""
    label = re.sub(r"[^A-Za-z0-9_-]", "-", name.partition(".")[0]).lstrip("_-")
    return label[:_MAX_HOST_NAME] or "host"


def _host_problem(host: str) -> str | None:
    """Return why this is neither an address nor a name of a host, or None."""
    try:
        address = ip_address(host)
    except ValueError:
        pass
    else:
        if address.is_unspecified or address.is_multicast:
            return "nobody can dial that address"
        return None
    if re.fullmatch(r".*\]?:\d+", host) and host.count(":") <= 1:
        return "it is without a port (network.announce_data_port and network.announce_maddrs name ports)"
    if not _HOST_NAME.fullmatch(host):
        return "it is neither an IP address nor the name of a host"
    if re.fullmatch(r"[\d.]+", host):
        return "it is not an IPv4 address, which has four numbers from 0 to 255"
    return None


_PATIENCE: Final = 3.0


class HealthConfig(Section):
    """When a silent peer counts as dead."""

    heartbeat_s: PositiveFloat = Field(default=0.25, description="Interval of heartbeats on an idle connection.")
    deadline_s: PositiveFloat = Field(
        default=2.0, description="Silence after which a connection is closed; at least 4 heartbeats."
    )
    max_deadline_s: PositiveFloat | None = Field(
        default=None,
        description="The same for a peer that is heard at irregular intervals, since its machine is starved or its "
        "link delivers in bursts: median + 8 * MAD of its intervals, but no longer than this. null: three times "
        "deadline_s.",
    )
    lost_state_after_s: PositiveFloat = Field(
        default=30.0,
        description="How long a stage without replicas waits for one that may still hold its state, when servers "
        "without it are there; then it starts again from the newest state that is left.",
    )

    @property
    def longest_deadline_s(self) -> float:
        """`max_deadline_s`, with its default."""
        return _PATIENCE * self.deadline_s if self.max_deadline_s is None else self.max_deadline_s


class ServersConfig(Section):
    """The servers that this host starts."""

    num_servers: PositiveInt | None = Field(
        default=None, description="Servers on this host, over all stages; null: stages * replicas."
    )
    replicas: PositiveInt = Field(default=2, description="Servers per stage where num_servers is null.")
    threads: Annotated[tuple[PositiveInt, ...], Field(min_length=1), BeforeValidator(split_values)] = Field(
        default=(1,),
        description="CPU threads that a server computes with: one number, or one for each server of this host.",
    )
    nice: Annotated[tuple[Niceness, ...], Field(min_length=1), BeforeValidator(split_values)] = Field(
        default=(0,),
        description="How much the servers of this host give way to other programs, 0 to 19 as for the command nice: "
        "one number, or one for each server.",
    )
    max_microbatch_samples: PositiveInt | None = Field(
        default=None,
        description="The most samples that the servers of this host take at a time: a trainer cuts its batch into more "
        "microbatches where its path needs it. null: any number. On a host that joins, DistQat's "
        "diloco.batch_size_per_step does the same.",
    )
    max_memory_bytes: ByteSize | None = Field(
        default=None,
        description="The most memory that each server may plan with, of its GPU or, on the CPU, of this host: 4GiB, "
        "800MB or bytes. Of a stage that needs more, what rounds alone need lies in files of log_dir's disk; then it "
        "is taken in smaller microbatches; then, on the CPU, moments of the inner optimizer lie in files too, which "
        "each step reads and writes; or it is not taken. null: what is free, shared evenly.",
    )
    max_disk_bytes: ByteCount | None = Field(
        default=None,
        description="The most of log_dir's disk that each server may use in place of memory that it lacks; 0: none. "
        "Only a disk of this machine is used. null: half of what is free, shared evenly.",
    )


class NotifyConfig(Section):
    """A program of the user's that hears of warnings."""

    command: Words = Field(
        default=(),
        description="A program and its arguments, started on the client's host for each event of level WARNING or "
        "worse, which it reads as a line of JSON from its standard input; no shell reads them. Empty: none. A "
        "password belongs into a file that it reads: the configuration is written to the logs.",
    )


class DashboardConfig(Section):
    """A page in the browser that shows the run while it goes on, on the client's host alone."""

    enable: bool = Field(
        default=True,
        description="Serve the page on loopback from the first step on; its address is printed (shoal[dashboard]).",
    )
    port: int = Field(default=8787, ge=0, le=65535, description="Its port; if that is taken, or 0, any that is free.")


class ParamMirrorConfig(Section):
    """A mirror holds the newest state of every stage for servers that come, and writes checkpoints."""

    enable: bool = Field(
        default=True,
        description="Run a mirror beside the client. It takes the memory of all outer states; a stage that loses all "
        "servers goes on from it. `shoal mirror` runs one on any other host.",
    )
    every_rounds: NonNegativeInt = Field(
        default=10,
        description="The mirror writes a checkpoint of each round that is a multiple of this, and always of the last "
        "one; 0: by time alone.",
    )
    every_s: PositiveFloat | None = Field(
        default=300.0, description="Besides, one when the last is so old; null: by rounds alone."
    )
    inner: Literal["all", "first", "none"] = Field(
        default="all",
        description="Whose inner optimizer states a checkpoint has: those of all replicas, or of one of each stage, "
        "whom the others copy after --resume, or of none. They come over the network: with AdamW twice the parameters "
        "for each replica.",
    )
    keep_last: PositiveInt = Field(default=2, description="So many checkpoints of a run stay, the newest ones.")
    keep_every_rounds: NonNegativeInt = Field(
        default=0, description="Checkpoints of rounds that are multiples of this stay as well; 0: none."
    )
    max_bytes: ByteSize | None = Field(
        default=None,
        description="The most that the checkpoints of a run may take together: then the oldest goes. null: no limit.",
    )
