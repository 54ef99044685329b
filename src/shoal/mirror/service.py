"""The role's entry: joins the swarm, stays connected with the client, holds the newest state of every stage.

The client names the record that stands (`Follow`), the mirror fetches what it names as a newcomer of each stage would.
It is told of the run's end as scouts are, and then waits to be stopped: the last checkpoint is written first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio
import msgspec

from shoal.averaging.signing import unsealer
from shoal.checkpoint.store import CheckpointStore
from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.control.counter_report import client_hop, counters_reported
from shoal.control.join import join_swarm
from shoal.control.records import MirrorRecord
from shoal.control.role_start import RoleStart, open_role_endpoint
from shoal.control.run_end import RunWatch
from shoal.errors import ShoalError
from shoal.events.base import tell
from shoal.events.mirror import CheckpointFailed
from shoal.identity import swarm_authority
from shoal.ids import PeerId
from shoal.mirror.checkpoints import kept_of
from shoal.mirror.mirror import Mirror
from shoal.pipeline.role_hooks import RoleHooks, role_hooks
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.launcher_messages import RoleReady
from shoal.transport.dispatch import dispatch

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a mirror.

    Args:
        control: is told `RoleReady` once it is announced.

    Raises:
        BootstrapError: no initial peer answered.
        ConfigError: a port to listen on is taken.
        StorageError: the last checkpoint was to be written, and its disk takes nothing.
    """
    spec = RoleStart.begun(payload)
    mirrors: list[Mirror] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, spec, control, mirrors.append)
        await control.stopping.wait()
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(control.say_it_leaves, SystemClock())  # a checkpoint may be large
            for mirror in mirrors:
                await mirror.finish()
            leaving.cancel_scope.cancel()
        tasks.cancel_scope.cancel()


async def _serve(spec: RoleStart, control: RoleControl, begun: Callable[[Mirror], None]) -> None:
    config, clock = spec.config(), SystemClock()
    authority = swarm_authority(spec.swarm_key).peer_id

    async with (
        DeviceThread(device_initialiser("cpu", 1), name="device") as device,
        open_role_endpoint(spec) as endpoint,
        join_swarm(spec, control, clock, endpoint) as registry,
        counters_reported(endpoint, spec.label, lambda: client_hop(registry.membership.view), clock),
        anyio.create_task_group() as tasks,
    ):
        membership = registry.membership
        record = MirrorRecord(endpoint.addresses, clock.unix_s(), host=config.network.shown_host_name)

        def announce(held_round: int) -> None:
            registry.advertise(msgspec.structs.replace(record, held_round=held_round), at_once=False)

        mirror = Mirror(
            config=config,
            run_id=spec.run_id,
            authority=authority,
            endpoint=endpoint,
            device=device,
            membership=membership,
            clock=clock,
            on_held=announce,
            store=_store(config, spec.run_id, authority, control.notice, role_hooks(spec)),
            notice=control.notice,
        )
        begun(mirror)
        watch = RunWatch(spec.run_id, endpoint, membership, clock)
        registry.advertise(record)
        tasks.start_soon(mirror.run)
        tasks.start_soon(watch.run)
        control.tell(RoleReady())
        await dispatch(endpoint, (*mirror.handlers, watch), mirror.peer_up)


def _store(
    config: Config, run_id: str, authority: PeerId, notice: Callable[[str], None], hooks: RoleHooks
) -> CheckpointStore | None:
    """Return where checkpoints go; None if that place cannot be used, which is no reason to mirror nothing."""
    try:
        check, policy = unsealer(run_id, authority), kept_of(config)
        return CheckpointStore(config.checkpoint_location, run_id, check, policy, hooks.reached)
    except ShoalError as error:
        tell(logger, CheckpointFailed(0, str(error)), notice)
        return None
