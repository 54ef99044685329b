"""The role that joins a swarm ahead of a host's servers: it tells the launcher which run there is, and when it is over.

    join the DHT -> `ready(run_id, configuration)` -> watch -> `run_over(reason)`
                                                        '-- announce the run while no client does

It computes nothing. Servers can only be started once the run is known, because they take its configuration. A scout
that follows one that has died is told which run it is, and only watches. On the host of a client that continues a run
it only finds it.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import anyio
import msgspec

from shoal import log
from shoal.clock import SystemClock
from shoal.config.shared import shared_configuration
from shoal.control.join import join_swarm
from shoal.control.membership import Membership
from shoal.control.peers_file import joinable
from shoal.control.records import Record, RunRecord
from shoal.control.registry import Registry
from shoal.control.run_config import pack_configuration, unpack_configuration
from shoal.control.run_end import how_it_ended
from shoal.control.scout_spec import ScoutSpec
from shoal.errors import BootstrapError
from shoal.identity import Identity
from shoal.runtime.control_pipe import RoleControl
from shoal.swarm.view import Run
from shoal.wire.handshake import version_misfit

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a scout.

    Args:
        payload: `ScoutSpec` in msgpack.
        control: told `ready(run_id=..., configuration=...)`, without fields if the run is known; then
            `run_announced(is_announced=...)` when that changes, `peers(maddrs=...)` when the swarm can be joined at
            other addresses, and in the end `run_over(reason=..., ended_well=...)`.

    Raises:
        BootstrapError: no initial peer answered, or none of them knows a run.
        RecordRejected: the run's configuration cannot be read.
    """
    spec = msgspec.msgpack.decode(payload, type=ScoutSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir), spec.config().log_level)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_scout, spec, control)
        await control.stopping.wait()
        tasks.cancel_scope.cancel()


async def _scout(spec: ScoutSpec, control: RoleControl) -> None:
    config, clock = spec.config(), SystemClock()
    async with join_swarm(spec, Identity(spec.identity_key), control, clock) as registry:
        run_id = spec.run_id
        if run_id:
            control.ready()
            packed = pack_configuration(shared_configuration(config))
            kept = RunRecord(run_id, config.num_stages, clock.unix_s(), packed, kept=True)
        else:
            run = await _running(registry, config.network.bootstrap_timeout_s, config.experiment_prefix)
            run_id = run.run_id
            logger.info("run.found", extra={"run": run_id, "client": run.client})
            control.ready(run_id=run_id, configuration=unpack_configuration(run.config))
            kept = RunRecord(run_id, run.num_stages, clock.unix_s(), run.config, kept=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_peers, registry.membership, control)
            await _watch(registry, kept, control)
            await control.stopping.wait()
            tasks.cancel_scope.cancel()


async def _tell_peers(membership: Membership, control: RoleControl) -> None:
    """Tell the launcher at which addresses the swarm can be joined."""
    async for maddrs in joinable(membership):
        control.event("peers", maddrs=maddrs)


class Announcer(Protocol):
    """What `_watch` needs of a `Registry`."""

    @property
    def membership(self) -> Membership:
        """What is announced."""
        ...

    def advertise(self, record: Record) -> None:
        """Announce the run."""
        ...

    async def withdraw(self) -> None:
        """Take that back."""
        ...


async def _watch(registry: Announcer, kept: RunRecord, control: RoleControl) -> None:
    """Say when the run is over, and meanwhile whether a client announces it; while none does, announce it."""
    membership, run_id = registry.membership, kept.run_id
    logger.info("scout.watching", extra={"run": run_id})
    is_announced = True
    while True:
        now = membership.view.run
        by_client = now is not None and not now.kept
        if now is not None and by_client and (now.ended or now.run_id != run_id):
            break
        # One that is not announced any more may go on: its client may be started again, or another one elsewhere.
        if is_announced != by_client:
            is_announced = by_client
            logger.info("run.announced" if is_announced else "run.silent", extra={"run": run_id})
            control.event("run_announced", is_announced=is_announced)
            if is_announced:
                await registry.withdraw()
            else:
                registry.advertise(kept)
            continue
        with nullcontext() if is_announced else membership.eager():
            await membership.changed()
    reason, ended_well = _how_it_ended(now, run_id)
    logger.info("run.over", extra={"run": run_id, "reason": reason})
    control.event("run_over", reason=reason, ended_well=ended_well)


def _how_it_ended(now: Run, run_id: str) -> tuple[str, bool]:
    """In words, and whether nothing went wrong."""
    if now.run_id != run_id:
        return f"a new run, {now.run_id}, has begun in place of {run_id}", False
    return how_it_ended(run_id, interrupted=now.interrupted, failure=now.failure)


async def _running(registry: Registry, timeout_s: float, prefix: str) -> Run:
    with anyio.move_on_after(timeout_s):
        view = await registry.membership.wait_for(lambda view: view.run is not None and not view.run.ended)
        if view.run is not None:
            return view.run
    if (ahead_s := registry.clock_difference_s) is not None:
        raise BootstrapError(
            f"the initial peers answered, but their clocks are about {abs(ahead_s):.0f} s "
            f"{'ahead of' if ahead_s > 0 else 'behind'} this host's, so neither believes what the other announces: set "
            "the clock that is wrong (timedatectl set-ntp true), and start again"
        )
    strangers = [f"{peer} {version_misfit(version)}" for peer, version in registry.membership.other_versions.items()]
    if strangers:
        raise BootstrapError(f"the swarm is there, but its peer {strangers[0]}")
    raise BootstrapError(
        f"the initial peers answered, but within {timeout_s:.0f} s none of them knew a run with experiment_prefix = "
        f"{prefix} and this swarm key. What a swarm announces can only be found with both, so one of them is not the "
        "client's:\n"
        "give --experiment-prefix exactly as the line has it that the client's host has printed,\n"
        "compare `shoal key fingerprint` on both hosts, and see whether the client still runs"
    )
