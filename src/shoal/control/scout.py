"""The role that joins a swarm ahead of a host's servers: it tells the launcher which run there is, and when it is over.

    join the DHT -> ask -> `ScoutReady` -> watch -> `RunConcluded`
                                             '-- announce the run while no client does

The registry says whom to ask; what the scout tells the launcher peers of the run have told it over TLS. It computes
nothing. Servers can only be started once the run is known, because they take its configuration. A scout
that follows one that has died is told which run it is, and only watches. On the host of a client that continues a run
it only finds it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext

import anyio
import msgspec

from shoal.clock import Clock, SystemClock
from shoal.control.counter_report import client_hop, counters_reported
from shoal.control.greeting import Greeter
from shoal.control.join import initial_peers_of, open_host_registry, require_same_swarm, taking_part
from shoal.control.known_client import keep_known_client
from shoal.control.membership import Membership
from shoal.control.peers_file import joinable
from shoal.control.records import TTL_S, RunRecord
from shoal.control.registry import Registry
from shoal.control.role_start import RoleStart, open_role_endpoint
from shoal.control.run_end import RunWatch
from shoal.control.run_question import ask_run, unpack_configuration
from shoal.errors import BootstrapError, ConnectionLost
from shoal.events.base import emit
from shoal.events.registry import RunHasEnded, RunIsAnnounced, RunIsSilent, RunUnconfirmed, ScoutFoundRun, ScoutWatching
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import InitialPeers, JoinedDht, RoleReady, RunAnnounced, RunConcluded, ScoutReady
from shoal.swarm.client_turn import ASK_AGAIN_S
from shoal.swarm.view import Run, SwarmView
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.dispatch import dispatch
from shoal.wire.handshake import version_misfit
from shoal.wire.messages.control import TellRun

logger = logging.getLogger(__name__)

_MAX_AHEAD_S = TTL_S / 2
"""Of the clock of who has confirmed the run: with more, what one host renews in time has expired on the other now and
then. An answer may be under way for less."""


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a scout.

    Args:
        payload: `RoleStart` in msgpack; its `run_id` is empty as long as nobody knows it.
        control: is told `ScoutReady`, or `RoleReady` if the run is known; then `RunAnnounced` when that changes,
            `InitialPeers` when the swarm can be joined at other addresses, and in the end `RunConcluded`.

    Raises:
        BootstrapError: no initial peer answered, or none of them knows a run.
        RecordRejected: the run's configuration cannot be read.
    """
    await control.until_stopped(_scout, RoleStart.begun(payload), control)


async def _scout(spec: RoleStart, control: RoleControl) -> None:
    config, clock = spec.config(), SystemClock()
    metrics = MetricRegistry()
    async with _in_the_swarm(spec, control, clock, metrics) as registry:
        num_stages = config.num_stages
        if spec.run_id:
            control.tell(RoleReady())
        else:
            found, told = await _running(registry, spec)
            num_stages, spec = found.num_stages, msgspec.structs.replace(spec, run_id=found.run_id)
            emit(logger, ScoutFoundRun(found.run_id, found.client))
            control.tell(ScoutReady(found.run_id, unpack_configuration(told.config)))
        kept = RunRecord(spec.run_id, num_stages, clock.unix_s(), kept=True)
        membership = registry.membership

        async def is_replaced_by(run: Run) -> bool:
            return await _is_led(run, membership.view, spec)

        async with (
            open_role_endpoint(spec, metrics) as endpoint,
            counters_reported(endpoint, spec.label, lambda: client_hop(membership.view), clock),
            anyio.create_task_group() as tasks,
        ):
            watch = RunWatch(spec.run_id, endpoint, membership, clock)
            tasks.start_soon(watch.run)
            tasks.start_soon(dispatch, endpoint, (watch,))
            tasks.start_soon(_tell_peers, membership, control)
            tasks.start_soon(keep_known_client, spec, spec.run_id, membership)
            await _watch(registry, kept, watch, is_replaced_by, control)


@asynccontextmanager
async def _in_the_swarm(
    spec: RoleStart, control: RoleControl, clock: Clock, metrics: MetricRegistry
) -> AsyncGenerator[Registry]:
    """Have the DHT node of this host, unless another process has it, and watch the swarm.

    Raises:
        BootstrapError: none of the initial peers answered, or they are of another swarm.
    """
    config = spec.config()
    peers = await initial_peers_of(spec, control)
    where = config.network.host_maddrs
    async with open_host_registry(spec, clock, peers, where, metrics) as (node, registry):
        control.tell(JoinedDht(await node.visible_maddrs()))
        if not spec.run_id:
            await require_same_swarm(node, Greeter(spec.swarm_key, config.experiment_prefix), peers)
        async with taking_part(registry):
            yield registry


async def _tell_peers(membership: Membership, control: RoleControl) -> None:
    """Tell the launcher at which addresses the swarm can be joined."""
    async for maddrs in joinable(membership):
        control.tell(InitialPeers(maddrs))


async def _watch(
    registry: Registry,
    kept: RunRecord,
    watch: RunWatch,
    is_replaced_by: Callable[[Run], Awaitable[bool]],
    control: RoleControl,
) -> None:
    """Say when the run is over, and meanwhile whether a client announces it; while none does, announce it.

    It is over when its client says so, or when another run has a client and this one has none.
    """
    membership, run_id = registry.membership, kept.run_id
    emit(logger, ScoutWatching(run_id))
    is_announced, over = True, watch.over
    while over is None:
        now, has_client = membership.view.run, watch.client is not None
        is_other = now is not None and now.run_id != run_id and not now.kept and not now.ended
        if now is not None and is_other and not has_client and await is_replaced_by(now):
            over = f"a new run, {now.run_id}, has begun in place of {run_id}", False
            break
        by_client = has_client or (now is not None and now.run_id == run_id and not now.kept)
        # One that is not announced any more may go on: its client may be started again, or another one elsewhere.
        if is_announced != by_client:
            is_announced = by_client
            emit(logger, RunIsAnnounced(run_id) if is_announced else RunIsSilent(run_id))
            control.tell(RunAnnounced(is_announced))
            if is_announced:
                await registry.withdraw()
            else:
                registry.advertise(kept)
            continue
        with (
            nullcontext() if is_announced else membership.eager(),
            anyio.move_on_after(ASK_AGAIN_S if is_other else None),
        ):
            await watch.changed()
        over = watch.over
    reason, ended_well = over
    emit(logger, RunHasEnded(run_id, reason))
    control.tell(RunConcluded(reason, ended_well))


async def _is_led(run: Run, view: SwarmView, spec: RoleStart) -> bool:
    """Ask the peer that announces another run whether it is the client of that run."""
    hops = [client.hop for client in view.clients if client.peer == run.client]
    try:
        peer, told = await ask_run(spec, run.run_id, hops)
    except ConnectionLost as error:
        emit(logger, RunUnconfirmed(run.run_id, str(error)))
        return False
    return told.client == peer


async def _running(registry: Registry, spec: RoleStart) -> tuple[Run, TellRun]:
    """Find a run that is announced, and that peers of it confirm.

    Raises:
        BootstrapError: there is none in time; the message says what may be wrong.
    """
    config, membership, reason = spec.config(), registry.membership, ""
    timeout_s, prefix = config.network.bootstrap_timeout_s, config.experiment_prefix
    with anyio.move_on_after(timeout_s):
        while True:
            view = await membership.wait_for(
                lambda view: view.run is not None and not view.run.ended and bool(view.informed)
            )
            run, hops = view.run, view.informed
            if run is None:
                continue
            try:
                _, told = await ask_run(spec, run.run_id, hops)
            except ConnectionLost as error:
                reason = (
                    f"run {run.run_id} is announced, but none of its peers can be asked from here, as if the client's "
                    f"TCP port were closed to this host (see network.data_port and --public-ip there): {error}"
                )
                emit(logger, RunUnconfirmed(run.run_id, str(error)))
                # Until they announce themselves anew: of those who are dead the registry speaks for a while.
                for hop in hops:
                    membership.lost(hop.peer)
            else:
                # What this host announces would have expired for the others, or what they announce for this host.
                ahead_s = told.unix_s - SystemClock().unix_s()
                if abs(ahead_s) > _MAX_AHEAD_S:
                    raise BootstrapError(_clocks_differ("a peer of the run", ahead_s))
                return run, told
    raise BootstrapError(reason or _why_no_run(registry, timeout_s, prefix))


def _clocks_differ(whose: str, ahead_s: float) -> str:
    return (
        f"{whose} answered, but the clock there is about {abs(ahead_s):.0f} s "
        f"{'ahead of' if ahead_s > 0 else 'behind'} this host's, so neither believes what the other announces: set "
        "the clock that is wrong (timedatectl set-ntp true), and start again"
    )


def _why_no_run(registry: Registry, timeout_s: float, prefix: str) -> str:
    if (ahead_s := registry.clock_difference_s) is not None:
        return _clocks_differ("an initial peer", ahead_s)
    strangers = [f"{peer} {version_misfit(version)}" for peer, version in registry.membership.other_versions.items()]
    if strangers:
        return f"the swarm is there, but its peer {strangers[0]}"
    return (
        f"the initial peers answered, but within {timeout_s:.0f} s none of them knew a run with experiment_prefix = "
        f"{prefix} and this swarm key. What a swarm announces can only be found with both, so one of them is not the "
        "client's:\n"
        "give --experiment-prefix exactly as the line has it that the client's host has printed,\n"
        "compare `shoal key fingerprint` on both hosts, and see whether the client still runs"
    )
