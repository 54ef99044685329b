"""What the checks judge: values that were seen, without an opinion. In place of what is not known stands why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shoal.cli.doctor.diagnosis import Judged, skipped
from shoal.control.initial_peers import Obstacle
from shoal.control.lan import FoundSwarm
from shoal.ids import PeerId
from shoal.runtime.run_dir import FoundDir, RunNote
from shoal.server.visible_gpus import VisibleGpus
from shoal.swarm.assignment import StageNeed
from shoal.swarm.view import ClientPeer, SwarmView


@dataclass(frozen=True)
class KeyFile:
    """The file that should hold the swarm's key.

    Attributes:
        mode: its permissions; None: there is no such file.
        size_bytes: of what it holds, up to one byte more than a key has; None: it cannot be read, for this `problem`.
    """

    path: Path
    mode: int | None
    size_bytes: int | None
    problem: str = ""
    fingerprint: str = ""


@dataclass(frozen=True)
class SwarmSeen:
    """What the DHT says to a peer with this host's key.

    Attributes:
        machine: what this host is called in addresses of Unix sockets.
        prefixes: of the swarms of the initial peers; None of one with another key. Empty: none has told.
        ahead_s: of a neighbour's clock; None: none has told.
        takes_large: whether a long question was answered by a peer that answers short ones, or answered some before.
    """

    machine: str
    own_prefix: str
    key_fingerprint: str
    prefixes: tuple[str | None, ...]
    ahead_s: float | None
    takes_large: Judged | bool
    large_bytes: int
    view: SwarmView
    other_versions: Mapping[PeerId, int]


@dataclass(frozen=True)
class ClientSeen:
    """The run's client, seen from here: why it cannot be dialled, or empty; and why this host's configuration does not
    go with the run's, or empty."""

    client: ClientPeer
    name: str
    problem: str
    misfit: str = ""


@dataclass(frozen=True)
class WantedPort:
    """A port that a role of this host will listen on, which key says so, and why it is not free, or empty."""

    key: str
    maddr: str
    problem: str


@dataclass(frozen=True)
class HostAddresses:
    """How other hosts would reach this one.

    Attributes:
        own: addresses of this host's interfaces.
        unresolved: announced names that this host does not know.
        peers: addresses of the initial peers, without names.
    """

    public_ip: str | None
    announce_maddrs: tuple[str, ...]
    host_maddrs: tuple[str, ...]
    own: tuple[str, ...]
    unresolved: tuple[str, ...]
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to: why it cannot, or empty, and what is free there."""

    key: str
    path: Path
    problem: str
    free_bytes: int


@dataclass(frozen=True)
class StageRoom:
    """What a server of this host may plan with, and what each stage needs."""

    share_bytes: int
    num_servers: int
    max_microbatch_samples: int | None
    needs: tuple[StageNeed, ...]
    disk_bytes: int = 0


@dataclass(frozen=True)
class WantedDevices:
    """The devices that are asked for, one for all servers or one for each, and the GPUs that torch can use; None: no
    server needs one."""

    wanted: tuple[str, ...]
    has_driver: bool
    gpus: VisibleGpus | None


@dataclass(frozen=True)
class WantedCores:
    """CPU threads of each server that computes on the CPU, and the cores of this host."""

    threads: tuple[int, ...]
    cores: int


@dataclass(frozen=True)
class DaemonFile:
    """libp2p's daemon as it is installed: why it cannot be started, or empty."""

    path: Path | None
    problem: str


@dataclass(frozen=True)
class HubLook:
    """What this host has to fetch from the hub, by which key; and why `place` cannot be reached, or empty."""

    wanted: tuple[str, ...]
    place: str
    problem: str


@dataclass(frozen=True)
class LanSeen:
    """What mDNS brings on the networks of this host.

    Attributes:
        hears_itself: an announcement of this host comes back to it.
        found: the run that is announced to those who have this host's key, and where it can be joined.
        needs_it: nobody has said where the swarm is.
        problem: why nothing can be announced or looked for, or empty.
    """

    hears_itself: bool
    found: FoundSwarm | None
    needs_it: bool
    problem: str = ""


@dataclass(frozen=True)
class RunsHere:
    """The launchers of this user on this host, and the directories of dead ones."""

    living: tuple[RunNote, ...]
    dead: tuple[FoundDir, ...]


@dataclass
class Facts:
    """Everything that was seen.

    A `Judged` in place of a fact says why it is not known. Of `configuration`, `joined`, `sockets` and `compiler` it is
    what there is to say: what else would stop there has looked.

    Attributes:
        peers: what stands in the way at each initial peer; None: nothing.
        are_remembered: nobody has named the initial peers: the newest run of this host has left them.
        programs: of each, what shoal needs and what is installed, or empty.
        max_files: that a process of this user may have open.
    """

    within_s: float
    configuration: Judged
    key: KeyFile | Judged
    joined: Judged
    peers: Mapping[str, Obstacle | None] | Judged
    are_remembered: bool
    swarm: SwarmSeen | Judged
    client: ClientSeen | Judged
    ports: tuple[WantedPort, ...] | Judged
    addresses: HostAddresses | Judged
    programs: Mapping[str, tuple[str, str]] | Judged
    daemon: DaemonFile | Judged
    sockets: Judged
    log_dir: Folder | Judged
    checkpoints: Folder | Judged
    room: StageRoom | Judged
    devices: WantedDevices | Judged
    max_files: int | Judged
    cores: WantedCores | Judged
    compiler: Judged
    hub: HubLook | Judged
    lan: LanSeen | Judged
    runs: RunsHere | Judged


def nothing_seen(within_s: float, why: str = "") -> Facts:
    """Return facts of which none is known.

    Args:
        why: empty: time was too short.
    """
    unknown = skipped(why or f"not known within {within_s:.0f} s: this host or the network is slow; try again")
    seen: dict[str, Any] = dict.fromkeys((each.name for each in fields(Facts)), unknown)
    seen.update(within_s=within_s, are_remembered=False)
    return Facts(**seen)
