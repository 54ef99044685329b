"""A host of servers, or of a mirror: what `start_servers.py`, `shoal start-servers` and `shoal mirror` do.

start the scout -> it finds the run and its configuration -> start the servers, or the mirror -> the run is over (or a
signal arrives, or none of them is left) -> end all roles
"""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
from anyio.abc import TaskGroup

from shoal import log
from shoal.cli.devices import devices_of_servers, unused_gpus
from shoal.cli.display import Display
from shoal.cli.early import EarlyStart, ending_signals
from shoal.cli.exits import DONE, FAILED, INTERRUPTED, USER_ERROR
from shoal.cli.farewell import GRACE_S, Farewell
from shoal.cli.finding import run_of
from shoal.cli.host import SwarmHost
from shoal.cli.host_network import HostNetwork
from shoal.cli.joining import LastingIdentities, addresses, continuation, require_membership
from shoal.cli.leaving import HostLeaves
from shoal.cli.run_files import in_time, make_joining_log_dir, remove_empty_outputs
from shoal.cli.run_row import ServersRow
from shoal.clock import Backoff, Clock, SystemClock
from shoal.config import Config
from shoal.config.shared import adopt_shared
from shoal.control.initial_peers import require_reachable
from shoal.control.peers_file import PeersFile
from shoal.errors import BootstrapError, RemoteError, ShoalError, StorageError
from shoal.events.base import Event, emit, tell
from shoal.events.hosts import (
    DiskFails,
    DiskTakesAgain,
    PeerFellSilent,
    PeerHeardAgain,
    ScoutGivenUp,
    ScoutLost,
    ServerGoesOn,
    ServerJoined,
    ServerServes,
    ServersFailed,
    ServersInterrupted,
    ServerStopped,
)
from shoal.events.links import ServerDialled, ServerUndialled
from shoal.events.mirror import MirrorServes
from shoal.events.processes import RoleIsRestarting, RoleLost, RoleRestartFailed
from shoal.events.registry import IdentityCopied, RunHasEnded, RunIsAnnounced, RunIsSilent
from shoal.file_thread import FileThread, remedy_of
from shoal.ids import PeerId
from shoal.runtime import launcher_messages as messages
from shoal.runtime.process_info import read_stat
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

_CLIENTS_HOST = "the client's host"

_WATCH_INTERVAL_S = 2.0
_STATE_INTERVAL_S = 2.0
"""Between looks at the processes of servers: one that is stopped says nothing."""
_STOP_ORDER = (("server", "mirror"), ("scout",))


def start_servers(config: Config, origins: Mapping[str, str], early: EarlyStart) -> int:
    """Serve the run that the initial peers know until it is over, and return the exit code.

    Args:
        config: of this host; the shared keys come from the run.
        origins: names the keys that this host sets, and where.
        early: runs already; the caller ends it.

    Raises:
        ConfigError: key or peers are missing, a shared key differs from the run's, or the device does not exist.
        BootstrapError: no initial peer answered in time, or none of them knows a run.
    """
    return _serve("servers", config, origins, devices_of_servers(config), early)


def start_mirror(config: Config, origins: Mapping[str, str], early: EarlyStart) -> int:
    """Mirror the run that the initial peers know until it is over, and return the exit code.

    Args and raises are those of `start_servers`; no device is used.
    """
    return _serve("mirror", config, origins, (), early)


def _serve(
    what: Literal["servers", "mirror"],
    config: Config,
    origins: Mapping[str, str],
    devices: Sequence[str],
    early: EarlyStart,
) -> int:
    swarm_key = require_membership(config)
    identities = LastingIdentities(what)
    try:

        async def run() -> int:
            host = ServerHost(what, config, origins, swarm_key, devices, identities, SystemClock(), early)
            return await host.run()

        early.require_uninterrupted()
        return anyio.run(run, backend_options={"use_uvloop": True})
    finally:
        identities.close()


@dataclass
class ServerHost:
    """The servers of one host, or its mirror; `run` is called once."""

    what: Literal["servers", "mirror"]
    config: Config
    origins: Mapping[str, str]
    swarm_key: bytes
    devices: Sequence[str]
    identities: LastingIdentities
    clock: Clock
    early: EarlyStart
    exit_code: int = FAILED
    _failure: ShoalError | None = None
    _display: Display = field(default_factory=Display)
    _row: ServersRow | None = None
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _hurry: anyio.Event = field(default_factory=anyio.Event)
    _log_dir: Path | None = None
    _peers_file: PeersFile | None = None
    _serving: int = 0
    _mirror: RoleHandle | None = None
    _farewell: Farewell = field(default_factory=Farewell)
    _servers: dict[RoleHandle, PeerId] = field(default_factory=dict[RoleHandle, PeerId])
    _renewed: set[RoleHandle] = field(default_factory=set[RoleHandle])

    def __post_init__(self) -> None:
        self._leaves = HostLeaves(self._say, self.clock)

    async def run(self) -> int:
        """Serve.

        Raises:
            ShoalError: the run could not be joined.
        """
        with self._display, anyio.open_signal_receiver(*ending_signals()) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch_signals, signals, tasks)
                tasks.start_soon(self._display.run)
                try:
                    async with Supervisor(
                        fork_servers=self.early.fork_servers, clock=self.clock, notice=self._say
                    ) as supervisor:
                        await self._supervise(supervisor)
                except ShoalError as error:
                    self._failure = self._failure or error
                tasks.cancel_scope.cancel()
        if self._log_dir is not None:
            with suppress(TimeoutError):
                await in_time(FileThread("last files"), partial(remove_empty_outputs, self._log_dir))
        if self._failure is not None and self.exit_code != INTERRUPTED:
            raise self._failure
        return self.exit_code

    async def _supervise(self, supervisor: Supervisor) -> None:
        async with anyio.create_task_group() as tasks:
            starting = anyio.CancelScope()
            tasks.start_soon(self.early.keep_run_dir)
            tasks.start_soon(self._start, supervisor, tasks, starting)
            await self._ended.wait()
            self._display.shown = None
            starting.cancel()
            tasks.start_soon(self._stop_at_once, supervisor)
            await self._farewell.take(self._mirror)
            if self._mirror is not None and self._mirror.last_error and self.exit_code == DONE:
                self._failure = StorageError(f"the last checkpoint is not written: {self._mirror.last_error}")
            await supervisor.stop(GRACE_S, _STOP_ORDER)
            tasks.cancel_scope.cancel()

    async def _start(self, supervisor: Supervisor, tasks: TaskGroup, starting: anyio.CancelScope) -> None:
        with starting:
            try:
                await self._join_and_serve(supervisor, tasks)
            except ShoalError as error:
                self._fail(error)

    async def _join_and_serve(self, supervisor: Supervisor, tasks: TaskGroup) -> None:
        if self.devices and (unused := unused_gpus(self.config)):
            self._say(unused)
        self._say(f"joining the swarm at {addresses(self.config.network.initial_peers)}")
        await require_reachable(self.config.network.initial_peers, self.clock, self._say)
        early = self._host(self.config, "", Path(self.early.run_dir.path), supervisor)
        scout = await early.start_scout()
        found = await run_of(scout, early, self._say)
        config = adopt_shared(self.config, self.origins, found.configuration, opens_data=False)
        self.early.preload_for(config)
        run_id = found.run_id
        log_dir = self._log_dir = make_joining_log_dir(config, run_id, self.what)
        self._peers_file = PeersFile(log_dir, self._say)
        log.configure("launcher", log_dir, config.log_level)
        self.early.announce(run_id, log_dir, hosts=self.what)
        self._say(f"run {run_id}, logs in {log_dir}")
        host = self._host(config, run_id, log_dir, supervisor)
        host.joined(scout, early.maddrs)
        tasks.start_soon(self._watch_run, scout, host)
        if self.what == "mirror":
            self._serving += 1
            self._mirror = await host.start_mirror()
            tasks.start_soon(self._follow_role, self._mirror, host)
            return
        if self._display.is_screen:
            tasks.start_soon(self._watch_swarm, config)
        self._row = self._display.shown = ServersRow(config.diloco.outer_steps, self.clock.now_s())
        self._say(f"starting {len(self.devices)} server{'s'[: len(self.devices) != 1]}")
        for index, device in enumerate(self.devices):
            # Servers of other hosts start too, so nobody knows how many there will be.
            server = await host.start_server(index, expected_servers=0, device=device)
            self._serving += 1
            self._servers[server] = host.hop("server", index).peer
            tasks.start_soon(self._follow_role, server, host)
        tasks.start_soon(self._watch_stopped, host)

    def _host(self, config: Config, run_id: str, log_dir: Path, supervisor: Supervisor) -> SwarmHost:
        host = SwarmHost(
            config=config,
            run_id=run_id,
            log_dir=log_dir,
            swarm_key=self.swarm_key,
            run_dir=self.early.run_dir,
            supervisor=supervisor,
            network=HostNetwork(config.network),
            identity_of=self.identities.identity,
        )
        host.initial_peers_known(config.network.initial_peers)
        return host

    async def _watch_run(self, scout: RoleHandle, host: SwarmHost) -> None:
        """Hear from the scout how the run goes, and if it dies from its successor, which is started again."""
        async for event in scout.events:
            self._hear(event, scout, host)
        if self._ended.is_set():
            return
        emit(logger, ScoutLost(str(await scout.wait())))
        # The first one was started to find the run. This one only watches it, however often it has to be started.
        scout = await self._next_scout(host)
        async for event in scout.events:
            self._hear(event, scout, host)
        if not self._ended.is_set():
            self._tell(ScoutGivenUp(str(await scout.wait()), host.run_id))

    async def _next_scout(self, host: SwarmHost) -> RoleHandle:
        """Start it as soon as the system lets it: what has ended the one before may be a lack of memory."""
        backoff = Backoff(first_s=0.2, max_s=30.0)
        while True:
            try:
                return await host.start_scout()
            except ShoalError as error:
                if not self._ended.is_set():
                    emit(logger, RoleRestartFailed("scout:0", str(error)))
                await backoff.wait(self.clock)

    async def _watch_swarm(self, config: Config) -> None:
        """Ask the client how the run is, for as long as there is a screen to show it on."""
        # Where nobody looks, nothing has loaded what asks.
        from shoal.cli.observing import SwarmObserver
        from shoal.cli.watching import FinderBesideScout, WatchedRun

        finder = FinderBesideScout(SwarmObserver(config, self.swarm_key, self.clock))
        watched = WatchedRun(finder, self.clock, _WATCH_INTERVAL_S)
        self._display.watch(lambda: watched.status)
        await watched.run()

    async def _watch_stopped(self, host: SwarmHost) -> None:
        """Say of a server that its process is stopped, and when it goes on; one that is killed is said elsewhere."""
        stopped: dict[tuple[RoleHandle, int], float] = {}
        while True:
            now_s = self.clock.now_s()
            found = {(role, role.pid): read_stat(role.pid) for role in self._servers if role.running}
            states = {server: stat.is_stopped for server, stat in found.items() if stat and not stat.has_ended}
            for (role, pid), since_s in list(stopped.items()):
                is_stopped = states.get((role, pid))
                if not is_stopped:
                    del stopped[role, pid]
                if is_stopped is False:
                    self._tell(ServerGoesOn(host.name_of(role), now_s - since_s))
            for role, pid in [server for server, is_stopped in states.items() if is_stopped]:
                if (role, pid) not in stopped:
                    stopped[role, pid] = now_s
                    self._tell(ServerStopped(host.name_of(role), pid))
            await self.clock.sleep_s(_STATE_INTERVAL_S)

    async def _follow_role(self, role: RoleHandle, host: SwarmHost) -> None:
        """Hear what a server, or the mirror, says, until it ends for good."""
        name = host.name_of(role)
        async for event in role.events:
            self._farewell.heard(role)
            self._hear(event, role, host)
        self._farewell.heard(role)
        status = await role.wait()
        self._serving -= 1
        self._leaves.gone(role)
        if self._row is not None:
            self._row.gone(role.spec.index)
        if self._ended.is_set() or self._leaves.has_begun:
            return
        reason = role.last_error or str(status)
        self._tell(RoleLost(name, str(status), reason))
        if not self._serving:
            left = "no server of this host is left" if self.what == "servers" else "the mirror of this host has ended"
            message = f"{left}; the logs are in {host.log_dir}"
            self._fail(BootstrapError(f"{reason}; {message}") if status.code == USER_ERROR else RemoteError(message))

    def _hear(self, event: messages.RoleEvent, role: RoleHandle, host: SwarmHost) -> None:
        """Act on what a role says of itself or of the run."""
        name, now_s, row = host.name_of(role), self.clock.now_s(), self._row
        match event:
            case messages.ServerReady(stage):
                self._tell(ServerServes(name, stage))
            case messages.RoleReady() if role.spec.role == "mirror":
                self._tell(MirrorServes(name, host.run_id))
            case messages.UserNotice(text):
                self._say(text)
            case messages.WorkDone(numbers) if row is not None:
                disk_fails = row.update(role.spec.index, numbers, now_s)
                if disk_fails is not None:
                    self._tell_of_disk(name, str(host.log_dir), int(disk_fails))
            case messages.PeerSilent(peer, who, silent_s) if row and row.silent(peer, who, now_s - silent_s):
                self._tell(PeerFellSilent(peer, who, silent_s))
            case messages.PeerHeard(peer, who) if row and (since_s := row.heard(peer)) is not None:
                self._tell(PeerHeardAgain(peer, who, now_s - since_s))
            case messages.RunAnnounced(is_announced):
                self._tell(RunIsAnnounced(host.run_id) if is_announced else RunIsSilent(host.run_id))
                for line in () if is_announced else continuation(host.config, host.maddrs):
                    self._display.say(line)
            case messages.RunConcluded(reason, ended_well) if not self._ended.is_set():
                self._tell(RunHasEnded(host.run_id, reason))
                self.exit_code = DONE if ended_well else FAILED
                self._ended.set()
            case messages.RoleRestarting(status=status) if not self._ended.is_set():
                self._tell(RoleIsRestarting(name, role.last_error or str(status)))
            case messages.RoleRestarted():
                host.restarted(role)
            case messages.IdentityIsCopied(by, yields):
                self._tell(IdentityCopied(name, by, yields))
                if yields:
                    self._renew(role, host)
            case messages.DialledBack(reason) if reason:
                self._tell(ServerUndialled(name, reason, dialled_from=_CLIENTS_HOST))
            case messages.DialledBack():
                self._tell(ServerDialled(name, dialled_from=_CLIENTS_HOST))
            case messages.JoinedDht(maddrs):
                host.joined(role, maddrs)
                if role.spec.role == "server":
                    self._tell(ServerJoined(name))
            case messages.ServerMayLeave() | messages.LastOfStage():
                self._leaves.take(event, role)
            case messages.InitialPeers(maddrs) if self._peers_file is not None:
                self._peers_file.write(maddrs)
            case _:
                pass

    def _renew(self, role: RoleHandle, host: SwarmHost) -> None:
        """Start a role again as somebody else, whose identity one of another host has too; and the scout, which
        announces itself nowhere, and so hears of no such thing."""
        scouts = [each for each in host.supervisor.roles if each.spec.role == "scout" and each.running]
        for each in {role, *scouts} - self._renewed:
            self._renewed.add(each)
            with suppress(OSError):  # a disk that takes nothing: it is noticed at the next start
                self.identities.forget(each.spec.role, each.spec.index)
            host.is_another(each)
        if role in self._servers:
            self._servers[role] = host.hop("server", role.spec.index).peer

    async def _watch_signals(self, signals: AsyncIterator[signal.Signals], tasks: TaskGroup) -> None:
        async for number in signals:
            interrupted = ServersInterrupted(number.name)
            if self._ended.is_set() or self._leaves.has_begun:
                emit(logger, interrupted)
                self._ended.set()
                self._hurry.set()
                continue
            self._tell(interrupted)
            self.exit_code = INTERRUPTED
            tasks.start_soon(self._leave)

    async def _leave(self) -> None:
        await self._leaves.run(self._servers)
        self._ended.set()

    async def _stop_at_once(self, supervisor: Supervisor) -> None:
        await self._hurry.wait()
        await supervisor.stop(0.0)

    def _fail(self, error: ShoalError) -> None:
        if not self._ended.is_set():
            emit(logger, ServersFailed(str(error)))
            self._failure = error
            self._ended.set()

    def _tell_of_disk(self, name: str, where: str, failure: int) -> None:
        self._tell(DiskFails(name, where, remedy_of(failure)) if failure else DiskTakesAgain(name))

    def _tell(self, event: Event) -> None:
        tell(logger, event, self._say)

    def _say(self, text: str) -> None:
        self._display.notice(text)
