"""A whole swarm in one process: real servers, trainers, data server and client over an in-process network.

Only what makes a process is replaced: sockets by a `MemoryNetwork`, the DHT by a `LocalRegistry`, the launcher by
tasks. Everything that trains is what production runs.

    async with Cluster(config, log_dir=tmp_path, replicas=[0, 0, 1, 1]) as cluster:
        cluster.when(Forward, action=lambda: cluster.kill_server(1), receiver=cluster.servers[1].peer, number=3)
        result = await cluster.run()
    assert result.audit.missing == 0
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from torch import Tensor

from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.client import Client
from shoal.clock import Clock, SystemClock
from shoal.config.schema import Config
from shoal.control.records import MirrorRecord, Record, StageRecord
from shoal.data.catalog import open_source
from shoal.data.feed import Feed
from shoal.data.source import DataSet
from shoal.errors import ConfigError
from shoal.ids import PeerId
from shoal.mirror.mirror import Mirror
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.launcher_messages import LastOfStage, LeaveTogether, ServerMayLeave, ToRole
from shoal.runtime.waking import Mailbox
from shoal.server.announcer import Announcer
from shoal.server.leaving import Leaving
from shoal.server.reassignment_monitor import ReassignmentMonitor
from shoal.server.replica import LocalReplica, build_replica
from shoal.swarm.assignment import Files
from shoal.swarm.content_transfer import CHUNK_BYTES, TransferSettings
from shoal.swarm.view import SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal_lab.client_host import AUTHORITY, ClientHost, run_id_of
from shoal_lab.emulation.device_pace import DevicePace
from shoal_lab.emulation.hooks import EmulatedRole
from shoal_lab.faults.messages import Faults
from shoal_lab.monitor import Monitor
from shoal_lab.process import Process
from shoal_lab.registry import LocalRegistry
from shoal_lab.results import ClusterResult

MONITOR = PeerId("monitor")
_TRANSFER_RETRY_S = 0.02
"""Rounds of tests are short; a real transfer has more patience."""
_FURTHER = 64
"""Microbatches of a step that a server takes where the way to it is long: it has the memory of the test's process."""


@dataclass(frozen=True)
class ClusterServer:
    """One server of a cluster.

    Attributes:
        orders: the messages of its launcher.
    """

    monitor: ReassignmentMonitor
    process: Process
    orders: Mailbox[ToRole]

    @property
    def replica(self) -> LocalReplica:
        """Its worker, its rounds, its model."""
        return self.monitor.replica

    @property
    def stage(self) -> int:
        """That it serves."""
        return self.replica.stage

    @property
    def peer(self) -> PeerId:
        """Who it is."""
        return self.process.peer

    def parameters(self) -> Tensor:
        """Return a copy of its parameters (N); only while it computes nothing."""
        return self.replica.compute.averaged.parameters.flat()


@dataclass(frozen=True)
class ClusterMirror:
    """One mirror of a cluster."""

    mirror: Mirror
    process: Process

    @property
    def peer(self) -> PeerId:
        """Who it is."""
        return self.process.peer


class Cluster:
    """A swarm in one process; an async context, used once.

    torch's random generator belongs to the process, so all replicas compute on one thread: operations of different
    replicas never overlap, and their seeds hold.

    Attributes:
        registry: holds the announcements of all peers, and can hide them.
        servers: in the order of `replicas`, then those that were started later.
        mirrors: in the order in which they were started.
        monitor: holds what the client has reported.
        said: what the servers have told their launcher about their leaving.
        device: the thread on which all replicas compute.
    """

    def __init__(
        self,
        config: Config,
        *,
        log_dir: Path,
        replicas: Sequence[int] | None = None,
        join_order: Sequence[int] | None = None,
        dataset: DataSet | None = None,
        clock: Clock | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        pinned: bool = True,
        caps: Mapping[int, int] | None = None,
        paces: Mapping[int, DevicePace] | None = None,
        checkpoint: StoredCheckpoint | None = None,
        files: Files = Files.NOTHING,
    ) -> None:
        """Prepare; entering the context builds everything.

        Args:
            config: `device` must be "cpu" or "auto".
            log_dir: an empty directory, for records and step logs.
            replicas: the stage of each server; None: `config.num_servers` servers, dealt out to the stages.
            join_order: indices of the servers in the order in which they join; None: in the order of their numbers.
            dataset: replaces the one that the configuration names.
            chunk_bytes: of state transfers.
            pinned: no server may be moved to another stage.
            caps: the most samples in a microbatch, by the server's number; other servers take any number.
            checkpoint: from which the run was resumed; `log_dir` is the folder that was prepared for it.
            paces: of emulated devices, by the server's number; a server that is started again keeps its pace.
            files: what of replicas lies in files, in `log_dir`.

        Raises:
            ConfigError: there is no such stage, or the order does not name exactly these servers.
        """
        stages = [i % config.num_stages for i in range(config.num_servers)] if replicas is None else list(replicas)
        order = list(range(len(stages))) if join_order is None else list(join_order)
        if not all(0 <= stage < config.num_stages for stage in stages) or sorted(order) != list(range(len(stages))):
            raise ConfigError(f"replicas {stages} in order {order} do not fit {config.num_stages} stages")
        self.network = MemoryNetwork(seed=0)
        self.servers: list[ClusterServer] = []
        self.mirrors: list[ClusterMirror] = []
        self.monitor = Monitor()
        self._config = config
        self._log_dir = log_dir
        self._stages = stages
        self._order = order
        self._dataset = dataset
        self._clock = clock or SystemClock()
        self._transfer = TransferSettings(retry_s=_TRANSFER_RETRY_S, chunk_bytes=chunk_bytes)
        self._pinned = pinned
        self._caps = dict(caps or {})
        self._paces = dict(paces or {})
        self._checkpoint = checkpoint
        self._files = files
        self._run_id = run_id_of(checkpoint)
        self._num_started = 0
        self.said: list[tuple[PeerId, LastOfStage | ServerMayLeave]] = []
        self._faults = Faults()
        self.registry = LocalRegistry(self._clock)
        self._begun_s = self._clock.now_s()
        self._stack = AsyncExitStack()
        self.network.before_delivery = self._faults.deliver

    # -- faults

    def when(self, *kinds: type, action: Callable[[], None], **which: Any) -> None:
        """Do something when a certain message is about to be delivered; see `testing.faults.messages.Faults.when`."""
        self._faults.when(*kinds, action=action, **which)

    def kill_server(self, index: int) -> None:
        """End a server as SIGKILL would."""
        self.servers[index].process.kill()

    async def leave_servers(self, *indices: int) -> None:
        """End servers as Ctrl-C on their host does, each when it may go, and wait for their ends."""
        leaving = [self.servers[index] for index in indices]
        for server in leaving:
            server.orders.put(LeaveTogether(tuple(each.peer for each in leaving)))
        for server in leaving:
            await server.process.ended.wait()

    def freeze_server(self, index: int) -> None:
        """Stop a server as SIGSTOP would: nobody loses it, and it answers nothing until it is killed."""
        self.servers[index].process.freeze()

    def kill_mirror(self, index: int = 0) -> None:
        """End a mirror as SIGKILL would."""
        self.mirrors[index].process.kill()

    def freeze_mirror(self, index: int = 0) -> None:
        """Stop a mirror as SIGSTOP would; see `freeze_server`."""
        self.mirrors[index].process.freeze()

    def kill_trainer(self, slot: int) -> None:
        """End a slot's trainer as SIGKILL would; the client starts another one, which goes on in its place."""
        self.host.launcher.trainers[slot].kill()

    def kill_data_server(self) -> None:
        """End the data server as SIGKILL would; `restart_data_server` starts it again."""
        self.host.kill_data_server()

    def restart_data_server(self) -> None:
        """Start a killed data server again: the same identity, nothing of what it knew."""
        self.host.serve_data()

    def kill_client(self, away_s: float = 0.02, until: anyio.Event | None = None) -> None:
        """End the client as SIGKILL would; `run` starts it again after so long and then: the same identity, and what
        its diary says."""
        self.host.kill_client(away_s, until)

    def kill_client_host(self) -> None:
        """End the client, its trainers and its data server at once; `run` goes on with the next host."""
        self.host.kill()

    def trainer_peer(self, slot: int) -> PeerId:
        """Return who a slot's trainer is, in all of its generations."""
        return self.host.trainer_peer(slot)

    @property
    def view(self) -> SwarmView:
        """What the servers announce about themselves, killed ones included."""
        return self.registry.watch().view

    def announce(self, peer: PeerId, record: Record) -> None:
        """Announce something in a peer's name."""
        self.registry.announce(peer, record)

    def trainer_endpoint(self, slot: int) -> MemoryEndpoint:
        """Return where a slot's trainer posts from, to have it say something else."""
        return self.host.launcher.trainers[slot].endpoint

    @property
    def client_peer(self) -> PeerId:
        """Who the client is."""
        return self.host.identity.peer_id

    @property
    def client(self) -> Client:
        """Forms pipelines, coordinates rounds, counts."""
        return self.host.client

    # -- the run

    async def run(self) -> ClusterResult:
        """Run the client from the first round to the last; one that is killed is started again.

        If its host is lost, another one continues the run, with nothing but what the servers hold.

        Raises:
            ShoalError: the run failed; alone or in an exception group.
        """
        number = 0
        while not await self.host.run_client():
            number += 1
            self.host = self.start_client_host(number)
        return await self.result()

    async def result(self, exit_reason: str = "done") -> ClusterResult:
        """Return what the run has come to so far; for runs that fail."""
        return await self.host.result(exit_reason)

    @asynccontextmanager
    async def reader(self, name: str = "reader") -> AsyncGenerator[Feed]:
        """Connect somebody who only reads, such as a plain loop to compare with, to the data server."""
        process = Process(self.network, PeerId(name))
        feed = Feed(endpoint=process.endpoint, data_server=self.host.data_server, trainer=-1, generation=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.run, lambda: dispatch(process.endpoint, (feed,)))
            yield feed
            process.kill()

    async def __aenter__(self) -> Cluster:
        try:
            await self._build()
        except BaseException:  # nobody calls __aexit__ when this fails: what was started has to end here
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._stack.__aexit__(*error)

    async def _build(self) -> None:
        config = self._config
        self.device = await self._stack.enter_async_context(
            DeviceThread(device_initialiser("cpu", config.servers.threads[0]))
        )
        tasks = await self._stack.enter_async_context(_cancelled_at_exit())
        self._tasks = tasks
        self._opened = self._dataset or await anyio.to_thread.run_sync(open_source, config)
        monitor = self._monitor_process = Process(self.network, MONITOR)
        tasks.start_soon(monitor.run, lambda: dispatch(monitor.endpoint, (self.monitor,)))
        for stage in self._stages:
            await self.start_server(stage)
        self.host = self.start_client_host(0)

    def start_client_host(self, number: int) -> ClientHost:
        """Start a host with a client, which its `run_client` runs; only that of host 0 begins the run."""
        log_dir = self._log_dir if number == 0 else self._log_dir.with_name(f"{self._log_dir.name}-host{number}")
        log_dir.mkdir(exist_ok=True)
        host = ClientHost(
            number=number,
            config=self._config,
            log_dir=log_dir,
            dataset=self._opened,
            network=self.network,
            registry=self.registry,
            monitor=self._monitor_process.endpoint.hop,
            clock=self._clock,
            tasks=self._tasks,
            expected_servers=lambda: len(self.servers),
            age_s=self._age_s,
            checkpoint=self._checkpoint,
        )
        self._stack.callback(lambda: host.diary.close())
        return host

    def _age_s(self) -> float:
        return self._clock.now_s() - self._begun_s

    async def start_server(self, stage: int) -> ClusterServer:
        """Start one more server, as somebody does who joins a run."""
        self._num_started += 1
        server = await self._build_server(self._num_started - 1, stage)
        self.servers.append(server)
        return server

    def start_mirror(self, store: CheckpointStore | None = None) -> ClusterMirror:
        """Start one more mirror; with a store it writes checkpoints."""
        process = Process(self.network, PeerId(f"mirror{len(self.mirrors)}"))
        mirror = Mirror(
            config=self._config,
            run_id=self._run_id,
            authority=AUTHORITY.peer_id,
            endpoint=process.endpoint,
            device=self.device,
            membership=self.registry.watch(process.peer),
            clock=self._clock,
            store=store,
            transfer=self._transfer,
        )

        async def serve() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(mirror.run)
                await dispatch(process.endpoint, mirror.handlers, mirror.peer_up)
                tasks.cancel_scope.cancel()

        self._tasks.start_soon(process.run, serve)
        self.registry.announce(process.peer, MirrorRecord(process.endpoint.addresses, self._age_s(), host="cluster"))
        self.mirrors.append(ClusterMirror(mirror, process))
        return self.mirrors[-1]

    async def restart_server(self, index: int) -> ClusterServer:
        """Start a killed server again: the same identity, nothing of what it held."""
        number = int(self.servers[index].peer.removeprefix("server"))
        self.servers[index] = await self._build_server(number, self.servers[index].stage)
        return self.servers[index]

    async def _build_server(self, number: int, stage: int) -> ClusterServer:
        process = Process(self.network, PeerId(f"server{number}"))
        membership = self.registry.watch(process.peer)
        cap = self._caps.get(number)

        async def build(stage: int) -> LocalReplica:
            return await build_replica(
                config=self._config,
                run_id=self._run_id,
                authority=AUTHORITY.peer_id,
                stage=stage,
                device=self.device,
                device_name="cpu",
                endpoint=process.endpoint,
                view=lambda: membership.view,
                log_dir=self._log_dir,
                max_microbatch_samples=cap,
                further_microbatches=_FURTHER,
                clock=self._clock,
                transfer=self._transfer,
                hooks=EmulatedRole(self._clock, pace=self._paces.get(number)),
                files=self._files,
            )

        joined = float(self._order.index(number) if number in self._order else number)
        record = StageRecord(
            process.endpoint.addresses,
            joined,
            pinned=self._pinned,
            max_microbatch_samples=cap,
            host="cluster",
            index=number,
        )
        monitor = ReassignmentMonitor(
            endpoint=process.endpoint,
            announcer=Announcer(self.registry.of(process.peer), record),
            replica=await build(stage),
            rebuild=build,
            view=lambda: membership.view,
            num_stages=self._config.num_stages,
        )

        leaving = Leaving(
            process.endpoint,
            replica=lambda: monitor.replica,
            view=lambda: membership.view,
            clock=self._clock,
            tell=lambda said: self.said.append((process.peer, said)),
        )

        orders = Mailbox[ToRole]()

        async def serve() -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(monitor.run)
                tasks.start_soon(dispatch, process.endpoint, (leaving, monitor), monitor.peer_up)
                await leaving.run(orders)
                tasks.cancel_scope.cancel()

        self._tasks.start_soon(process.run, serve)
        return ClusterServer(monitor, process, orders)


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncGenerator[TaskGroup]:
    """Run background tasks until the context is left."""
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()
