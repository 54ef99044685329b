"""How a role that acts on the swarm joins it: a DHT node, and a registry that keeps its view up to date."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from shoal import log
from shoal.clock import Clock
from shoal.config.start import RoleStart
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter, misfit
from shoal.control.membership import Membership
from shoal.control.registry import Registry
from shoal.errors import BootstrapError
from shoal.identity import Identity, namespace
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import InitialPeers, JoinedDht
from shoal.telemetry.registry import MetricRegistry

_MAX_ASKED = 8


@asynccontextmanager
async def open_registry(
    start: RoleStart,
    identity: Identity,
    clock: Clock,
    initial_peers: Sequence[str],
    host_maddrs: Sequence[str],
    metrics: MetricRegistry | None = None,
    membership: Membership | None = None,
) -> AsyncGenerator[tuple[DhtNode, Registry]]:
    """Start a DHT node and a registry over it. The caller runs the registry; the node ends with the context. As long as
    it is open, the log of this process says what peers are called.

    Args:
        start: its configuration and key say which swarm it is.
        initial_peers: addresses of other peers; empty for the first one.
        metrics: counts refused records.
        membership: the registry feeds it; None: a new one.

    Raises:
        BootstrapError: none of the initial peers answered.
        ConfigError: a port to listen on is taken.
    """
    config = start.config()
    swarm = namespace(start.swarm_key, config.experiment_prefix)
    async with await DhtNode.create(
        identity,
        namespace=swarm,
        state_dir=Path(start.socket_path).parent,
        clock=clock,
        metrics=metrics,
        initial_peers=tuple(initial_peers),
        host_maddrs=tuple(host_maddrs),
        announce_maddrs=config.network.announce_maddrs,
        bootstrap_timeout_s=config.network.bootstrap_timeout_s,
        greeter=Greeter(start.swarm_key, config.experiment_prefix),
    ) as node:
        registry = Registry(node, identity, swarm, config.num_stages, clock, membership)
        log.name_peers(lambda peer: registry.membership.view.name_of(peer))
        try:
            yield node, registry
        finally:
            log.name_peers(None)


@asynccontextmanager
async def join_swarm(
    start: RoleStart,
    identity: Identity,
    control: RoleControl,
    clock: Clock,
    metrics: MetricRegistry | None = None,
    membership: Membership | None = None,
) -> AsyncGenerator[Registry]:
    """Join the DHT and watch it until the context is left; own records are withdrawn then.

    Args:
        start: its configuration says where to listen. Without initial peers in it, the launcher sends them.
        control: the pipe to the launcher; is told `JoinedDht`.
        metrics: counts the records that are dropped.
        membership: the registry feeds it; None: a new one.

    Raises:
        BootstrapError: the launcher did not say in time where the initial peers are, none of them answered, or they
            are of another swarm.
    """
    config = start.config()
    timeout_s = config.network.bootstrap_timeout_s
    # The first peer may need as long to reach peers of its own; if it does not, its error says more than ours.
    patience_s = 2 * timeout_s if config.network.initial_peers else timeout_s
    initial_peers = start.initial_peers or await _initial_peers(control, patience_s)
    where = config.network.host_maddrs
    async with open_registry(start, identity, clock, initial_peers, where, metrics, membership) as (node, registry):
        # A monitor that is started again finds the swarm by those who are in it.
        control.tell(JoinedDht(await node.visible_maddrs()))
        if not start.run_id:
            await require_same_swarm(node, Greeter(start.swarm_key, config.experiment_prefix), initial_peers)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(registry.run)
            try:
                yield registry
            finally:
                await registry.withdraw()
                tasks.cancel_scope.cancel()


async def require_same_swarm(node: DhtNode, own: Greeter, initial_peers: Sequence[str]) -> None:
    """Ask the initial peers for their swarm: of another one nothing would ever be seen.

    Raises:
        BootstrapError: it has another key or prefix; says which.
    """
    peers = dict.fromkeys(maddr.partition("/p2p/")[2] for maddr in initial_peers[:_MAX_ASKED])
    if (problem := misfit(own, await node.prefixes_of(filter(None, peers)))) is not None:
        raise BootstrapError(problem)


async def _initial_peers(control: RoleControl, timeout_s: float) -> tuple[str, ...]:
    """Wait until the launcher has heard from the first peer."""
    with anyio.move_on_after(timeout_s):
        async for order in control.orders:
            if isinstance(order, InitialPeers):
                return order.maddrs
    raise BootstrapError(
        f"the first peer of the swarm did not come up within {timeout_s:.0f} s: see the monitor's log, or give "
        f"addresses with --network-initial-peers"
    )
