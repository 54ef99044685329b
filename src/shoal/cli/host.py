"""The roles of one host: makes their identities and sockets, starts them, answers what the client asks for.

Peer ids and socket paths are chosen here before any role runs, so all roles start at the same time and none waits for
another to say where it is. Only the DHT's addresses are known late: the monitor reports them, and they are passed on.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shoal.cli.devices import devices_of_servers
from shoal.cli.host_network import LOOPBACK_MADDRS, HostNetwork, local_maddrs
from shoal.clock import Clock, SystemClock
from shoal.config import Config, config_to_json
from shoal.config.host import NetworkConfig
from shoal.config.per_server import of_server
from shoal.control.peers_file import read_peers_file
from shoal.control.role_start import (
    BaselineSpec,
    ClientSpec,
    DataServerSpec,
    MonitorSpec,
    ProfilerSpec,
    ResumedFrom,
    RoleStart,
    ServerSpec,
    TrainerSpec,
)
from shoal.errors import BadSamples, ConnectionLost, ShoalError
from shoal.events.base import emit
from shoal.events.hosts import DataServerKilled
from shoal.events.registry import DhtJoined
from shoal.file_thread import FileThread
from shoal.identity import Identity
from shoal.runtime import launcher_messages as messages
from shoal.runtime.memory import free_memory_bytes
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import NEVER_RESTART, RestartPolicy, RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor
from shoal.swarm.view import label_of_role
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)

_Start = TypeVar("_Start", bound=RoleStart)

# Somebody waits for each of them, and after five times in a minute it is over: long pauses would spare nobody.
_POLICY = RestartPolicy(max_restarts=5, window_s=60.0, first_delay_s=0.2, max_delay_s=1.0)
_RESTARTS: Mapping[str, RestartPolicy] = {
    "server": _POLICY,
    "monitor": replace(_POLICY, serves_on=True),
    "data_server": replace(_POLICY, serves_on=True, last_words=frozenset({BadSamples.__name__})),
    "scout": _POLICY,
    "mirror": _POLICY,
    # All trainers may be waiting for it at the end of their round.
    "client": replace(_POLICY, first_delay_s=0.05, only_killed=True),
}
"""What is started again when it fails, under the same identity. A trainer's successor is started by its client."""

_MAX_LOSSES = 64

_NEED_PEERS = ("server", "client", "scout", "mirror")

_MIRROR_NICE = 5
"""Nobody waits for a mirror but where nothing is trained."""


@dataclass
class SwarmHost:
    """Starts the roles of one host under a supervisor.

    Attributes:
        log_dir: `logs/<run_id>`.
        network: how other hosts reach this one; None: there are no others.
        identity_of: returns the identity of a role and its index, the same at each start; None makes new ones.
    """

    config: Config
    run_id: str
    log_dir: Path
    swarm_key: bytes
    run_dir: RunDir
    supervisor: Supervisor
    network: HostNetwork | None = None
    identity_of: Callable[[str, int], Identity] | None = None
    monitor_network: NetworkConfig | None = None
    clock: Clock = field(default_factory=SystemClock)
    _identities: dict[tuple[str, int], Identity] = field(default_factory=dict[tuple[str, int], Identity])
    _waiting_for_peers: list[RoleHandle] = field(default_factory=list[RoleHandle])
    _initial_peers: tuple[str, ...] | None = None
    _memory_bytes: int | None = None
    _joined: dict[RoleHandle, tuple[str, ...]] = field(default_factory=dict[RoleHandle, tuple[str, ...]])
    _data_server: RoleHandle | None = None
    _trainers: dict[int, RoleHandle] = field(default_factory=dict[int, RoleHandle])
    _generations: dict[int, int] = field(default_factory=dict[int, int])  # of trainers, also of some that never began
    _losses: deque[messages.LostProcess] = field(default_factory=lambda: deque(maxlen=_MAX_LOSSES))
    _disk: FileThread = field(default_factory=lambda: FileThread("peers file"))

    def hop(self, role: str, index: int = 0) -> Hop:
        """Return the peer id and address that a role has or will have."""
        return Hop(self._identity(role, index).peer_id, (f"unix:{self._socket(role, index)}",))

    def name_of(self, role: RoleHandle) -> str:
        """Return what the user calls a role of this host, as on all other hosts."""
        return str(label_of_role(role.spec.role, role.spec.index, self.config.network.shown_host_name))

    async def start_monitor(self) -> RoleHandle:
        """Start the first DHT peer; `initial_peers_known` passes its addresses on."""
        if self.network is not None and self.monitor_network is None:
            self.monitor_network = self.network.monitor(self.run_dir.claim_port)
        hosted = {"client": self.hop("client").peer, "initial_peers": self.config.network.initial_peers}
        spec = self._spec(MonitorSpec, "monitor", 0, **hosted)
        return await self._start("shoal.monitor.service:main", spec)

    async def start_scout(self) -> RoleHandle:
        """Start the role that finds out which run there is, or, if that is known, watches it."""
        scout = self._spec(RoleStart, "scout", 0)
        return self._needs_peers(await self._start("shoal.control.scout:main", scout))

    async def start_profiler(self, device: str, *, measure: bool) -> RoleHandle:
        """Start the role that says what the units of the model cost, and ends."""
        spec = ProfilerSpec(
            config_json=config_to_json(self.config), log_dir=str(self.log_dir), device=device, measure=measure
        )
        return await self.supervisor.start(
            RoleSpec(
                role="profiler",
                index=0,
                entry="shoal.server.profiler:main",
                payload=msgspec.msgpack.encode(spec),
                output_path=str(self.log_dir / "profiler_0.out"),
            )
        )

    async def start_client(
        self,
        expected_servers: int,
        *,
        patient: bool = False,
        succeeds: bool = False,
        resumed: ResumedFrom | None = None,
    ) -> RoleHandle:
        """Start the client.

        Args:
            expected_servers: how many its first round waits for, for a while.
            patient: it waits for them without a limit.
            succeeds: a client of another host has begun the run.
            resumed: from which checkpoint it goes on; its log folder is prepared for that.
        """
        spec = self._spec(
            ClientSpec,
            "client",
            0,
            launcher_pid=os.getpid(),
            expected_servers=expected_servers,
            patient=patient,
            succeeds=succeeds,
            resumed=resumed,
            data_server=self.hop("data_server"),
            monitor=self.hop("monitor"),
        )
        return self._needs_peers(await self._start("shoal.client.service:main", spec))

    async def start_server(self, index: int, *, expected_servers: int, device: str) -> RoleHandle:
        """Start a server, which chooses its stage itself."""
        if self._memory_bytes is None:
            # Once, before any server has taken its share: one that is started again has the same.
            self._memory_bytes = free_memory_bytes() // self.config.num_servers
        devices = devices_of_servers(self.config)
        spec = self._spec(
            ServerSpec,
            "server",
            index,
            stage=None,
            expected_servers=expected_servers,
            device=device,
            memory_bytes=self._memory_bytes,
            device_sharers=max(1, devices.count(device)),
            threads=of_server(self.config.servers.threads, index),
        )
        nice = of_server(self.config.servers.nice, index)
        return self._needs_peers(await self._start("shoal.server.service:main", spec, nice=nice))

    async def start_mirror(self) -> RoleHandle:
        """Start the role that holds the newest state of every stage."""
        spec = self._spec(RoleStart, "mirror", 0)
        return self._needs_peers(await self._start("shoal.mirror.service:main", spec, nice=_MIRROR_NICE))

    async def start_baseline(self) -> RoleHandle:
        """Start the plain loop beside the swarm, fed by the same data server."""
        device = devices_of_servers(self.config)[0]
        hops = {name: self.hop(name) for name in ("data_server", "monitor")}
        spec = self._spec(BaselineSpec, "baseline", 0, device=device, **hops)
        return await self._start("shoal.trainer.baseline_service:main", spec)

    def monitor_known(self, maddrs: tuple[str, ...]) -> None:
        """Tell every role that joins the DHT where the monitor is, by the shortest way."""
        local = () if self.monitor_network is None else local_maddrs(self.monitor_network, self.hop("monitor").peer)
        self.initial_peers_known(local or maddrs)

    def initial_peers_known(self, addresses: tuple[str, ...]) -> None:
        """Tell every role that joins the DHT where its first peers are."""
        self._initial_peers = addresses
        for handle in self._waiting_for_peers:
            self._tell_peers(handle)
        self._waiting_for_peers.clear()

    async def answer(self, client: RoleHandle, asked: messages.RoleAsks) -> RoleHandle | None:
        """Do what the client asks for: start its data server, or a trainer. Returns what was started.

        A request for the data server is answered by `answer_when_ready`: it may have to download first. A client that
        was started again asks for it again, and (`Adopt`) for what it has to know of the time without it.
        """
        started: RoleHandle | None = None
        reply: messages.AnyReply = messages.LauncherAnswer()
        try:
            match asked.request:
                case messages.StartDataServer():
                    if self._data_server is not None:
                        return None
                    spec = self._spec(DataServerSpec, "data_server", 0, client=self.hop("client").peer)
                    self._data_server = await self._start("shoal.data_server.service:main", spec)
                    return self._data_server
                case messages.ReplaceDataServer():
                    self._end_data_server()
                case messages.Adopt():
                    running = [slot for slot, trainer in self._trainers.items() if trainer.running]
                    reply = messages.Adoption(dict(self._generations), running, list(self._losses))
                case messages.StartTrainer(slot, generation):
                    started = await self._start_trainer(slot, generation)
        except ShoalError as error:
            self._refuse(client, asked, error)
            return None
        client.reply(asked, reply)
        return started

    def _refuse(self, client: RoleHandle, asked: messages.RoleAsks, error: ShoalError) -> None:
        """Say why it was not done; the client of a host that leaves is asked to leave, which is no failure."""
        if not self.supervisor.stopping:
            client.reply(asked, messages.LauncherAnswer(str(error) or type(error).__name__))

    def _end_data_server(self) -> None:
        """End a data server that does not answer, for it is frozen; one that has ended comes back by itself."""
        if self._data_server is not None and self._data_server.serves:
            emit(logger, DataServerKilled(self._data_server.pid))
            self.supervisor.kill(self._data_server)

    async def answer_when_ready(self, client: RoleHandle, asked: messages.RoleAsks) -> None:
        """Answer a request for the data server when it can be used; returns then, or when it has failed."""
        if self._data_server is None:
            return
        try:
            await self._data_server.ready()
        except ShoalError as error:
            self._refuse(client, asked, error)
        else:
            client.reply(asked, messages.LauncherAnswer())

    async def _start_trainer(self, slot: int, generation: int) -> RoleHandle:
        """Start a slot's trainer under an identity of its own: a frozen predecessor that wakes up is somebody else."""
        if (predecessor := self._trainers.pop(slot, None)) is not None:
            self.supervisor.kill(predecessor)
        # Even if it cannot be started: replicas refuse earlier ones by now, and the client may be started again.
        self._generations[slot] = generation
        spec = msgspec.structs.replace(
            self._spec(
                TrainerSpec,
                "trainer",
                slot,
                slot=slot,
                generation=generation,
                client=self.hop("client"),
                data_server=self.hop("data_server"),
            ),
            identity_key=Identity.generate().private_bytes,
            socket_path=str(self._socket(f"trainer_{slot}", generation)),
        )
        started = await self._start("shoal.trainer.service:main", spec)
        self._trainers[slot] = started
        return started

    def exited(self, handle: RoleHandle) -> None:
        """Note that a process of a role has ended before its time."""
        role, index = handle.spec.role, handle.spec.index
        if role in ("client", "data_server", "server", "trainer"):
            peer = self.hop(role, index).peer if role == "server" else None
            self._losses.append(messages.LostProcess(role, self.clock.now_s(), index, peer))

    async def _start(self, entry: str, spec: RoleStart, *, nice: int = 0) -> RoleHandle:
        output = self.log_dir / f"{spec.role}_{spec.index}.log"
        return await self.supervisor.start(
            RoleSpec(
                role=spec.role,
                index=spec.index,
                entry=entry,
                payload=msgspec.msgpack.encode(spec),
                output_path=str(output.with_suffix(".out")),
                nice=nice,
                # Without a run it has been asked to find one, which is not to be done twice.
                restart=_RESTARTS.get(spec.role, NEVER_RESTART) if spec.run_id else NEVER_RESTART,
            )
        )

    def restarted(self, handle: RoleHandle) -> None:
        """Tell a role that was started again what its first process was told."""
        if handle.spec.role in _NEED_PEERS:
            self._needs_peers(handle)
        elif handle.spec.role == "monitor":
            own = self.hop("monitor").peer
            others = [*self.maddrs]
            others += [maddr for maddr in self._listed() if not maddr.endswith(f"/p2p/{own}")]
            with suppress(ConnectionLost):
                handle.send(messages.InitialPeers(tuple(dict.fromkeys(others))))

    def is_another(self, handle: RoleHandle) -> None:
        """Have a role go on under another identity, which is new if the one that it had was forgotten."""
        role, index = handle.spec.role, handle.spec.index
        self._identities.pop((role, index), None)
        told = msgspec.msgpack.decode(handle.spec.payload)
        told["identity_key"] = self._identity(role, index).private_bytes
        handle.spec = replace(handle.spec, payload=msgspec.msgpack.encode(told))
        self.supervisor.kill(handle)

    def joined(self, handle: RoleHandle, maddrs: Sequence[str]) -> None:
        """Remember by which addresses a role takes part in the DHT."""
        self._joined[handle] = tuple(maddrs)
        emit(logger, DhtJoined(str(handle.spec), list(maddrs)))

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Where the roles of this host take part in the DHT."""
        return tuple(maddr for maddrs in self._joined.values() for maddr in maddrs)

    def _needs_peers(self, handle: RoleHandle) -> RoleHandle:
        if self._initial_peers is None:
            self._waiting_for_peers.append(handle)
        else:
            self._tell_peers(handle)
        return handle

    def _tell_peers(self, handle: RoleHandle) -> None:
        others = [maddr for peer, maddrs in self._joined.items() if peer is not handle for maddr in maddrs]
        # The first peers may be gone by now, and nobody else of this host be left.
        listed = self._listed()
        # A role that has ended meanwhile joins nothing; whoever follows it notices.
        with suppress(ConnectionLost):
            handle.send(messages.InitialPeers(tuple(dict.fromkeys((*(self._initial_peers or ()), *others, *listed)))))

    def _listed(self) -> tuple[str, ...]:
        """The addresses in the run's file; none while its disk does not answer."""
        read = self._disk.do(partial(read_peers_file, self.log_dir))
        return read.result() if read.done() else ()

    def _spec(self, kind: type[_Start], role: str, index: int, **fields: Any) -> _Start:
        return kind(
            run_id=self.run_id,
            role=role,
            index=index,
            config_json=config_to_json(self._config_for(role, index)),
            identity_key=self._identity(role, index).private_bytes,
            swarm_key=self.swarm_key,
            socket_path=str(self._socket(role, index)),
            log_dir=str(self.log_dir),
            **self._wire_for(role, index),
            **fields,
        )

    def _config_for(self, role: str, index: int) -> Config:
        """The configuration with the addresses on which this role's DHT node listens."""
        return self.config.model_copy(update={"network": self._dht_for(role, index)})

    def _dht_for(self, role: str, index: int) -> NetworkConfig:
        settings = self.config.network
        if self.network is None:
            # Nobody outside may join, and nothing for NATs is started.
            is_unset = settings.host_maddrs == NetworkConfig().host_maddrs
            return settings.model_copy(update={"host_maddrs": LOOPBACK_MADDRS}) if is_unset else settings
        match role:
            case "monitor":
                return self.monitor_network or settings
            case "client":
                return self.network.dht(1)
            case "scout":
                return self.network.dht(self.config.num_servers)
            case "mirror" if self._is_clients:
                return self.network.dht(2)
            case _:
                return self.network.dht(index)

    def _wire_for(self, role: str, index: int) -> dict[str, Any]:
        """How this role reaches other hosts and is reached; monitor and data server speak to this one alone."""
        if self.network is None or role not in ("client", "trainer", "server", "scout", "mirror"):
            return {}
        if role in ("trainer", "scout"):
            # They dial servers, or the client, and are answered over that connection.
            return {"between_hosts": True}
        place = 1 if role == "mirror" and self._is_clients else index
        return {
            "between_hosts": True,
            "listen_tcp": self.network.listen_tcp(place),
            "announce": self.network.announce(place),
        }

    @property
    def _is_clients(self) -> bool:
        """Whether the client runs on this host, and before it the monitor."""
        return self.monitor_network is not None

    def _identity(self, role: str, index: int) -> Identity:
        known = self._identities.get((role, index))
        if known is None:
            known = Identity.generate() if self.identity_of is None else self.identity_of(role, index)
            self._identities[role, index] = known
        return known

    def _socket(self, role: str, index: int) -> Path:
        return self.run_dir.socket_path(f"{role}_{index}")
