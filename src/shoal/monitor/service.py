"""The role's entry: joins the DHT first, tells everybody where it is, and passes numbers on.

Metrics of the run -> Status -> status events for the terminal view, at most two a second
                            -> one W&B run
PeerMetrics -> PeerNumbers -> the same W&B run; in the log at the end
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from shoal import log
from shoal.clock import Clock, SystemClock
from shoal.config import Config, public_values
from shoal.control.counter_report import client_hop, counters_reported
from shoal.control.join import open_registry
from shoal.control.maddrs import outward
from shoal.control.peer_numbers import PeerNumbers
from shoal.control.peers_file import PeersFile, keep_peers_file
from shoal.control.records import MonitorRecord
from shoal.control.registry import Registry
from shoal.control.role_endpoint import open_role_endpoint
from shoal.errors import ConnectionLost, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.monitor import PeersMeasured, WandbUnfinished
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.monitor.spec import MonitorSpec
from shoal.monitor.status import Status
from shoal.monitor.wandb_run import WandbRun, WandbSettings
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import InitialPeers, MonitorReady, StatusChanged, UserNotice
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.control import Metrics, PeerMetrics

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.5
_PEERS_TIMEOUT_S = 2.0
_WANDB_CLOSE_TIMEOUT_S = 2.0


async def main(spec: bytes, control: RoleControl) -> None:
    """Run a monitor.

    Args:
        spec: `MonitorSpec` in msgpack.
        control: is told `MonitorReady` once others can join the DHT through this peer; later `StatusChanged` and
            `UserNotice`.

    Raises:
        BootstrapError: there are initial peers, and none of them answered.
        ConfigError: the port to listen on is taken.
    """
    start = msgspec.msgpack.decode(spec, type=MonitorSpec)
    log.configure(start.log_path.stem, Path(start.log_dir), start.config().log_level)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, start, control)
        await control.stopping.wait()
        tasks.cancel_scope.cancel()


async def _serve(start: MonitorSpec, control: RoleControl) -> None:
    config, clock, identity = start.config(), SystemClock(), Identity(start.identity_key)
    joined_unix_s = clock.unix_s()
    peers_file = PeersFile(Path(start.log_dir), start.role, lambda text: control.tell(UserNotice(text)))
    gatherer = Gatherer(Status(config.num_stages), _wandb_run(start, config, control), clock, start.client)
    try:
        async with (
            open_role_endpoint(start, identity) as endpoint,
            open_registry(
                start,
                identity,
                clock,
                start.initial_peers or await _known_before(peers_file, control),
                listen_maddrs(config),
                endpoint.metrics,
            ) as (node, registry),
        ):
            maddrs = outward(await node.visible_maddrs())
            await anyio.to_thread.run_sync(peers_file.write, maddrs)
            registry.advertise(MonitorRecord(endpoint.addresses, joined_unix_s))
            control.tell(MonitorReady(maddrs))
            reported = counters_reported(endpoint, start.role, lambda: client_hop(registry.membership.view), clock)
            async with reported, anyio.create_task_group() as tasks:
                tasks.start_soon(registry.run)
                tasks.start_soon(gatherer.follow, registry)
                tasks.start_soon(keep_peers_file, peers_file, registry.membership, maddrs)
                tasks.start_soon(gatherer.report, control)
                await dispatch(endpoint, (gatherer,))
    finally:
        with anyio.CancelScope(shield=True):
            await gatherer.aclose()


async def _known_before(peers_file: PeersFile, control: RoleControl) -> tuple[str, ...]:
    """Return where the others are, if this monitor has run before: the launcher says it, and alone it would stay alone.

    Empty at its first start.
    """
    if peers_file.exists:
        with anyio.move_on_after(_PEERS_TIMEOUT_S):
            async for order in control.orders:
                if isinstance(order, InitialPeers):
                    return order.maddrs
    return ()


class Gatherer:
    """Takes messages with numbers and hands these on."""

    def __init__(self, status: Status, wandb_run: WandbRun | None, clock: Clock, client: PeerId) -> None:
        """Start with nothing; `wandb_run` None logs nowhere.

        Args:
            client: passes on what others have measured.
        """
        self._client = client
        self._peers = PeerNumbers()
        self._view = SwarmView()
        self._status = status
        self._wandb_run = wandb_run
        self._clock = clock
        self._changed = anyio.Event()

    def receive(self, event: Received) -> bool:
        """Take a message if it holds numbers; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: the sender speaks for another peer, and is not the client.
        """
        if isinstance(event.message, PeerMetrics):
            if event.peer != self._client:
                raise RemoteProtocolError(f"{event.peer} tells what others have measured: only the client does")
            self._peers.take(event.message.peer, event.message.report, self._clock.now_s())
            return True
        if not isinstance(event.message, Metrics):
            return False
        # Nobody speaks for another peer.
        values = self._status.add(msgspec.structs.replace(event.message, peer=event.peer), self._clock.now_s())
        if values and self._wandb_run is not None:
            # In a row of the run's: curves are drawn over its samples, which a peer does not know.
            self._wandb_run.log(values | flat(self.measured(self._peers.news())))
        self._changed.set()
        return True

    def measured(self, peers: Iterable[PeerId]) -> dict[str, dict[str, float]]:
        """Return what these peers have measured, by what each is called."""
        reports = self._peers.reports()
        return {self._view.name_of(peer, reports[peer].role or "peer"): self._peers.values(peer) for peer in peers}

    def peer_lost(self, peer: PeerId) -> None:
        """What a client says of the swarm counts as long as it is there."""
        if self._status.lost(peer):
            self._changed.set()

    async def follow(self, registry: Registry) -> None:
        """Take over the registry's view whenever it changes."""
        while True:
            self._view = await registry.membership.changed()
            self._status.seen(self._view)
            self._changed.set()

    async def report(self, control: RoleControl) -> None:
        """Send the status to the launcher when it has changed, at most every `STATUS_INTERVAL_S`."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            control.tell(StatusChanged(self._status.values, dict(self._status.at_s)))
            await self._clock.sleep_s(STATUS_INTERVAL_S)

    async def aclose(self) -> None:
        """Leave in the log what each peer has measured, and finish the W&B run; bounded."""
        emit(logger, PeersMeasured(self.measured(self._peers.reports())))
        if self._wandb_run is not None:
            finished = await anyio.to_thread.run_sync(self._wandb_run.close, _WANDB_CLOSE_TIMEOUT_S)
            if not finished:
                emit(logger, WandbUnfinished(_WANDB_CLOSE_TIMEOUT_S))


def flat(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return values of peers by one name each: `server 1@box2/step.committed`."""
    return {f"{peer}/{name}": value for peer, own in values.items() for name, value in own.items()}


def listen_maddrs(config: Config) -> tuple[str, ...]:
    """Return the addresses for the first peer: those of the configuration, any free port replaced by `monitor_port`."""
    port = config.network.monitor_port
    return tuple(
        f"{maddr.removesuffix('/tcp/0')}/tcp/{port}" if maddr.endswith("/tcp/0") else maddr
        for maddr in config.network.host_maddrs
    )


def _wandb_run(start: MonitorSpec, config: Config, control: RoleControl) -> WandbRun | None:
    if not config.wandb:
        return None
    settings = WandbSettings(
        name=start.run_id,
        directory=Path(start.log_dir),
        config=public_values(config),
        project=config.wandb_project,
        entity=config.wandb_entity,
        run_id=config.wandb_run_id or start.run_id,
    )
    return WandbRun(settings, _notice_from_thread(control))


def _notice_from_thread(control: RoleControl) -> Callable[[str], None]:
    """Return a function that another thread may call to send a notice to the launcher."""
    loop = asyncio.get_running_loop()

    def send(text: str) -> None:
        # The launcher may be gone by now; then nobody reads notices.
        with suppress(ConnectionLost):
            control.tell(UserNotice(text))

    def notice(text: str) -> None:
        # A loop that has ended refuses: this role is gone, and nobody reads notices.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(send, text)

    return notice
