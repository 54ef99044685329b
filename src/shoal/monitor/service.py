"""The role's entry: joins the DHT first, tells everybody where it is, and passes numbers and events on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.clock import Clock, SystemClock
from shoal.config import Config, published_values
from shoal.control.counter_report import client_hop, counters_reported
from shoal.control.join import open_host_registry
from shoal.control.membership import Membership
from shoal.control.peers_file import PeersFile, keep_peers_file
from shoal.control.records import MonitorRecord
from shoal.control.role_start import MonitorSpec, open_role_endpoint
from shoal.errors import ConnectionLost
from shoal.monitor.exporters.base import Exporter, Newest
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.exporters.notify import NotifyCommand
from shoal.monitor.exporters.wandb_run import WandbRun, WandbSettings
from shoal.monitor.gatherer import Gatherer
from shoal.monitor.http.dashboard import Dashboard, DashboardSettings
from shoal.monitor.page.chronicle import info_of
from shoal.monitor.status import Status
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import InitialPeers, MonitorReady
from shoal.transport.dispatch import dispatch

_PEERS_TIMEOUT_S = 2.0


async def main(spec: bytes, control: RoleControl) -> None:
    """Run a monitor.

    Args:
        control: is told `MonitorReady` once others can join the DHT through this peer; later `StatusChanged` and
            `UserNotice`.

    Raises:
        BootstrapError: there are initial peers, and none of them answered.
        ConfigError: the port to listen on is taken.
    """
    start = MonitorSpec.begun(spec)
    config, clock = start.config(), SystemClock()
    exporters = _exporters(start, config, control)
    dashboard = _dashboard(start, config, control, clock, lambda: gatherer.newest())
    if config.dashboard.enable:
        exporters = (*exporters, dashboard)
    gatherer = Gatherer(Status(config.num_stages), exporters, clock, start.client)
    async with anyio.create_task_group() as tasks:
        if config.dashboard.enable:
            tasks.start_soon(dashboard.run)
        tasks.start_soon(_serve, start, control, config, clock, gatherer)
        await control.stopping.wait()
        tasks.cancel_scope.cancel()


async def _serve(start: MonitorSpec, control: RoleControl, config: Config, clock: Clock, gatherer: Gatherer) -> None:
    joined_unix_s = clock.unix_s()
    peers_file = PeersFile(Path(start.log_dir), control.notice)
    try:
        async with (
            open_role_endpoint(start) as endpoint,
            open_host_registry(
                start,
                clock,
                start.initial_peers or await _known_before(peers_file, control),
                listen_maddrs(config),
                endpoint.metrics,
            ) as (node, registry),
        ):
            maddrs = node.maddrs
            await anyio.to_thread.run_sync(peers_file.write, maddrs)
            registry.advertise(MonitorRecord(endpoint.addresses, joined_unix_s))
            control.tell(MonitorReady(maddrs))
            reported = counters_reported(endpoint, start.label, lambda: client_hop(registry.membership.view), clock)
            async with reported, anyio.create_task_group() as tasks:
                tasks.start_soon(registry.run)
                tasks.start_soon(gatherer.follow, registry)
                tasks.start_soon(keep_peers_file, peers_file, registry.membership, lambda: node.maddrs)
                tasks.start_soon(moves_told, registry.membership, lambda: node.maddrs, maddrs, control)
                tasks.start_soon(gatherer.report, control)
                tasks.start_soon(gatherer.export)
                await dispatch(endpoint, (gatherer,))
    finally:
        with anyio.CancelScope(shield=True):
            await gatherer.aclose()


async def moves_told(
    membership: Membership, where: Callable[[], tuple[str, ...]], told: tuple[str, ...], control: RoleControl
) -> None:
    """Tell the launcher whenever this host has lost an address: others join at those that it has then.

    Args:
        where: returns the addresses; own records, which come into the membership, have them as well.
        told: those that it knows.
    """
    while True:
        await membership.changed()
        if set(told) - set(now := where()):
            told = now
            control.tell(MonitorReady(told))


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


def listen_maddrs(config: Config) -> tuple[str, ...]:
    """Return the addresses for the first peer: those of the configuration, any free port replaced by `monitor_port`."""
    port = config.network.monitor_port
    return tuple(
        f"{maddr.removesuffix('/tcp/0')}/tcp/{port}" if maddr.endswith("/tcp/0") else maddr
        for maddr in config.network.host_maddrs
    )


def _exporters(start: MonitorSpec, config: Config, control: RoleControl) -> tuple[Exporter, ...]:
    exporters: list[Exporter] = [MetricsFile(Path(start.log_dir))]
    if config.wandb:
        exporters.append(_wandb_run(start, config, control))
    if config.notify.command:
        exporters.append(NotifyCommand(config.notify.command, _notice_from_thread(control)))
    return tuple(exporters)


def _dashboard(
    start: MonitorSpec, config: Config, control: RoleControl, clock: Clock, newest: Callable[[], Newest]
) -> Dashboard:
    settings = DashboardSettings(
        Path(start.log_dir), start.run_id, config.dashboard.port, info_of(config, start.run_id)
    )
    return Dashboard(settings, clock, control.notice, newest, control.stopping.is_set)


def _wandb_run(start: MonitorSpec, config: Config, control: RoleControl) -> WandbRun:
    settings = WandbSettings(
        name=start.run_id,
        directory=Path(start.log_dir),
        config=published_values(config),
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
            control.notice(text)

    def notice(text: str) -> None:
        # A loop that has ended refuses: this role is gone, and nobody reads notices.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(send, text)

    return notice
