"""What each process of the swarm is told when it starts, and how it begins by that: its log, its endpoint.

It reaches the process over a pipe, never over argv or the environment, because it holds keys. Roles that have to be
told more than all extend `RoleStart` here, where neither they nor their launcher need torch for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from shoal import log
from shoal.config.load import config_from_json
from shoal.config.schema import Config
from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.swarm.view import PeerLabel, label_of_role
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import limits_for
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages.base import Hop

_UPLINK = "uplink"
"""In the directory that all roles of a launcher have their sockets in."""


class RoleStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Start parameters that all roles share.

    Attributes:
        index: Number among the processes of this role on this host, from 0.
        identity_key: Ed25519 private key, 32 bytes.
        swarm_key: The swarm's pre-shared key, 32 bytes.
        log_dir: `logs/<run_id>` of this host.
        initial_peers: Multiaddresses of DHT peers to join; empty for the first peer.
        between_hosts: Whether peers of other hosts are reached, over TLS with the swarm's key.
        listen_tcp: Address and port to listen on for other hosts; None is not dialled by them.
        announce: Hosts, or `host:port`, under which others reach this role; empty: the addresses of its interfaces.
    """

    run_id: str
    role: str
    index: int
    config_json: bytes
    identity_key: bytes
    swarm_key: bytes
    socket_path: str
    log_dir: str
    initial_peers: tuple[str, ...] = ()
    between_hosts: bool = False
    listen_tcp: tuple[str, int] | None = None
    announce: tuple[str, ...] = ()

    @classmethod
    def begun(cls, payload: bytes) -> Self:
        """Return what a role was told, in msgpack, and have its process log from now on."""
        start = msgspec.msgpack.decode(payload, type=cls)
        log.configure(start.log_path.stem, Path(start.log_dir), start.config().log_level)
        return start

    def config(self) -> Config:
        """Return the resolved configuration."""
        return config_from_json(self.config_json)

    @property
    def label(self) -> PeerLabel:
        """What people call the role."""
        return label_of_role(self.role, self.index, self.config().network.shown_host_name)

    @property
    def identity(self) -> Identity:
        """Who the role is."""
        return Identity(self.identity_key)

    @property
    def log_path(self) -> Path:
        """`<role>_<n>.log` of this process."""
        return Path(self.log_dir) / f"{self.role}_{self.index}.log"


class MonitorSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a monitor.

    Attributes:
        client: Of this host, which alone passes on what others have measured.
    """

    client: PeerId


class ResumedFrom(msgspec.Struct, frozen=True):
    """A checkpoint of the run.

    Attributes:
        location: As `checkpoint.store.CheckpointStore` takes it.
    """

    location: str
    round: int


class ClientSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a client.

    Attributes:
        launcher_pid: The run begins, for all ages, when this process was started.
        expected_servers: How many servers the launcher starts with the client; the first round waits a while for them.
        succeeds: A client of another host has begun the run.
        patient: Wait for them without a limit, or for one complete pipeline if `expected_servers` is 0.
        resumed: From which checkpoint the run goes on; its files are in `log_dir` (`client.resuming`).
        data_server: Of this host; the client asks the launcher to start it.
    """

    launcher_pid: int
    expected_servers: int
    succeeds: bool = False
    patient: bool = False
    resumed: ResumedFrom | None = None
    data_server: Hop
    monitor: Hop


class DataServerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a data server.

    Attributes:
        client: The only peer that may plan, record and release; None where peers only read, as the baseline does.
    """

    client: PeerId | None


class TrainerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a trainer.

    Attributes:
        slot: The pipeline that is its home, 0-based; also its number in step ids.
        generation: Counts the starts of this slot's trainer in the run, from 1.
        client: The one that started it.
    """

    slot: int
    generation: int
    client: Hop
    data_server: Hop


class BaselineSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of the plain loop that runs beside a swarm.

    Attributes:
        monitor: Gets the losses.
    """

    data_server: Hop
    monitor: Hop
    device: str


class ServerSpec(RoleStart, frozen=True, kw_only=True):
    """Start parameters of a server.

    Attributes:
        stage: None takes the one that needs a server most.
        expected_servers: How many servers start together, including this one; 0: not known.
        device: Torch device, resolved: "cpu", "mps" or "cuda:<i>".
        memory_bytes: Its share of the host's memory when the first server started; 0: not known.
        device_sharers: Servers of this host on the same device, including this one.
    """

    stage: int | None
    expected_servers: int
    device: str
    memory_bytes: int = 0
    device_sharers: int = 1
    threads: int = 1


class ProfilerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Start parameters of a profiler. It has no identity, because it talks only to the launcher.

    Attributes:
        config_json: The resolved configuration, without the cut.
        log_dir: `logs/<run_id>` of this host.
        device: Torch device, resolved: "cpu", "mps" or "cuda:<i>".
        measure: False takes the family's own figures.
    """

    config_json: bytes
    log_dir: str
    device: str
    measure: bool

    def config(self) -> Config:
        """Return the configuration."""
        return config_from_json(self.config_json)


def open_role_endpoint(start: RoleStart, metrics: MetricRegistry | None = None) -> StreamEndpoint:
    """Return the endpoint that a role was told to have, to be entered as an asynchronous context: on a Unix socket, and
    under TLS for other hosts where there are any.

    Args:
        metrics: of a process that counts before it has an endpoint; None: new ones.

    Raises:
        ConfigError: on entering, if an address cannot be used.
    """
    config = start.config()
    socket_path = Path(start.socket_path)
    return open_endpoint(
        identity=start.identity,
        run_id=RunId(start.run_id),
        role=start.role,
        unix_path=socket_path,
        swarm_key=start.swarm_key if start.between_hosts else None,
        tcp=start.listen_tcp,
        announce=start.announce,
        max_upload_mbit=config.network.max_upload_mbit,
        uplink_file=socket_path.parent / _UPLINK,
        limits=limits_for(config.health, start.role),
        metrics=metrics,
    )
