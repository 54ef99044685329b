"""How a role that acts on the swarm joins it: the DHT node of its host, and a registry that keeps its view true."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from shoal import log
from shoal.clock import Clock
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter, misfit
from shoal.control.host_node import HostNode, NodePlace, beside, served
from shoal.control.maddrs import peer_in
from shoal.control.membership import Membership
from shoal.control.record_checker import RecordChecker
from shoal.control.records import VerifiedRecord, hop_of
from shoal.control.registry import Registry
from shoal.control.role_start import RoleStart
from shoal.control.view_builder import label_of
from shoal.errors import BootstrapError, ConfigError
from shoal.identity import namespace
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import IdentityIsCopied, InitialPeers, JoinedDht
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import Endpoint

_MAX_ASKED = 8


@asynccontextmanager
async def open_registry(
    start: RoleStart,
    clock: Clock,
    initial_peers: Sequence[str],
    host_maddrs: Sequence[str],
    metrics: MetricRegistry | None = None,
) -> AsyncGenerator[tuple[DhtNode, Registry]]:
    """Start a DHT node and a registry over it. The caller runs the registry; the node ends with the context. As long as
    it is open, the log of this process says what peers are called.

    Args:
        start: its configuration and key say which swarm it is.
        initial_peers: addresses of other peers; empty for the first one.

    Raises:
        BootstrapError: none of the initial peers answered.
        ConfigError: a port to listen on is taken.
    """
    config = start.config()
    swarm = namespace(start.swarm_key, config.experiment_prefix)
    async with await _start_node(start, clock, metrics, initial_peers, host_maddrs) as node:
        registry = Registry(node, start.identity, swarm, config.num_stages, clock)
        with _named(registry):
            yield node, registry


@asynccontextmanager
async def join_swarm(
    start: RoleStart,
    control: RoleControl,
    clock: Clock,
    endpoint: Endpoint,
    membership: Membership | None = None,
) -> AsyncGenerator[Registry]:
    """Take part in the swarm through the DHT node of this host until the context is left, see `control.host_node`;
    own records are withdrawn then.

    Args:
        start: its configuration says where to listen with a node of its own.
        control: the pipe to the launcher, which says when there is a node; is told `JoinedDht` of one of this process.
        endpoint: of this peer, wherever it is; its numbers count the records that are dropped.
        membership: the registry feeds it; None: a new one.

    Raises:
        BootstrapError: the launcher did not say in time where the initial peers are, or there is no node.
    """
    config = start.config()
    swarm = namespace(start.swarm_key, config.experiment_prefix)
    initial_peers = await initial_peers_of(start, control)
    membership = membership or Membership(clock)

    async def start_own(peers: Sequence[str], gone: Sequence[str]) -> DhtNode:
        where = config.network.host_maddrs
        try:
            return await _start_node(start, clock, endpoint.metrics, peers, where, strays=True, gone=gone)
        except ConfigError as error:
            # The port may be free again later, and this role goes on meanwhile.
            raise BootstrapError(str(error)) from error

    def tell(maddrs: tuple[str, ...]) -> None:
        # A monitor that is started again finds the swarm by it.
        control.tell(JoinedDht(maddrs))

    directory, identity = Path(start.socket_path).parent, start.identity

    def copied(by: VerifiedRecord, yields: bool) -> None:
        control.tell(IdentityIsCopied(f"{label_of(by.record)} at {', '.join(hop_of(by).addresses)}", yields))

    checker = RecordChecker(swarm, str.encode, clock, endpoint.metrics)
    async with HostNode(
        directory, identity.peer_id, checker, clock, start_own, initial_peers, lambda: membership.view.maddrs, tell
    ) as node:
        await node.join(config.network.bootstrap_timeout_s)
        stages = config.num_stages
        registry = Registry(node, identity, swarm, stages, clock, membership, lambda: endpoint.addresses, copied)
        with _named(registry):
            async with taking_part(registry):
                yield registry


@asynccontextmanager
async def open_host_registry(
    start: RoleStart,
    clock: Clock,
    initial_peers: Sequence[str],
    host_maddrs: Sequence[str],
    metrics: MetricRegistry | None = None,
) -> AsyncGenerator[tuple[DhtNode, Registry]]:
    """As `open_registry`, and serve the node to the other roles of this host; one that serves already is joined."""
    place = NodePlace(Path(start.socket_path).parent)
    first = (*await beside(place, clock), *initial_peers)
    async with (
        open_registry(start, clock, first, host_maddrs, metrics) as (node, registry),
        served(node, place),
    ):
        yield node, registry


@asynccontextmanager
async def taking_part(registry: Registry) -> AsyncGenerator[None]:
    """Run a registry until the context is left; own records are withdrawn then."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(registry.run)
        try:
            yield
        finally:
            await registry.withdraw()
            tasks.cancel_scope.cancel()


async def _start_node(
    start: RoleStart,
    clock: Clock,
    metrics: MetricRegistry | None,
    initial_peers: Sequence[str],
    host_maddrs: Sequence[str],
    *,
    strays: bool = False,
    gone: Sequence[str] = (),
) -> DhtNode:
    config = start.config()
    return await DhtNode.create(
        start.identity,
        namespace=namespace(start.swarm_key, config.experiment_prefix),
        state_dir=Path(start.socket_path).parent,
        clock=clock,
        metrics=metrics,
        initial_peers=tuple(initial_peers),
        host_maddrs=tuple(host_maddrs),
        announce_maddrs=config.network.announce_maddrs,
        bootstrap_timeout_s=config.network.bootstrap_timeout_s,
        greeter=Greeter(start.swarm_key, config.experiment_prefix),
        strays=strays,
        gone=gone,
    )


@contextmanager
def _named(registry: Registry) -> Generator[None]:
    log.name_peers(lambda peer: registry.membership.view.name_of(peer))
    try:
        yield
    finally:
        log.name_peers(None)


async def require_same_swarm(node: DhtNode, own: Greeter, initial_peers: Sequence[str]) -> None:
    """Ask the initial peers for their swarm: of another one nothing would ever be seen.

    Raises:
        BootstrapError: it has another key or prefix; says which.
    """
    peers = dict.fromkeys(peer_in(maddr) for maddr in initial_peers[:_MAX_ASKED])
    if (problem := misfit(own, await node.prefixes_of(filter(None, peers)))) is not None:
        raise BootstrapError(problem)


async def initial_peers_of(start: RoleStart, control: RoleControl) -> tuple[str, ...]:
    """Return the multiaddresses of the initial peers: where `start` has none, the launcher sends them when it has heard
    from the first one.

    Raises:
        BootstrapError: it did not say in time.
    """
    if start.initial_peers:
        return start.initial_peers
    network = start.config().network
    # The first peer may need as long to reach peers of its own; if it does not, its error says more than ours.
    timeout_s = network.bootstrap_timeout_s * (2 if network.initial_peers else 1)
    with anyio.move_on_after(timeout_s):
        async for order in control.orders:
            if isinstance(order, InitialPeers):
                return order.maddrs
    raise BootstrapError(
        f"the first peer of the swarm did not come up within {timeout_s:.0f} s: see the monitor's log, or give "
        f"addresses with --network-initial-peers"
    )
