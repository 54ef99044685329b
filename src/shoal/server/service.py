"""The role's entry: joins the swarm, finds its stage, builds the replica and serves it until it is told to stop."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import msgspec

from shoal import log
from shoal.clock import SystemClock
from shoal.control.assignment import StageChooser
from shoal.control.join import join_swarm
from shoal.control.records import StageRecord
from shoal.control.registry import Registry
from shoal.control.role_endpoint import open_role_endpoint
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.device_thread import DeviceThread
from shoal.server.announcer import Announcer
from shoal.server.replica import build_replica, device_initialiser
from shoal.server.spec import ServerSpec
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import dispatch

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a server.

    Args:
        payload: `ServerSpec` in msgpack.
        control: told `ready(stage=...)` once the replica can be used.

    Raises:
        BootstrapError: no initial peer answered.
        ConfigError: no stage fits, or the device does not exist.
    """
    spec = msgspec.msgpack.decode(payload, type=ServerSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, spec, control)
        await control.stopping.wait()
        tasks.cancel_scope.cancel()


async def _serve(spec: ServerSpec, control: RoleControl) -> None:
    config = spec.config()
    clock = SystemClock()
    identity = Identity(spec.identity_key)
    initialiser = device_initialiser(spec.device, config.servers.threads)
    async with (
        DeviceThread(initialiser, name="device") as device,
        open_role_endpoint(spec, identity) as endpoint,
        join_swarm(spec, identity, control, clock) as registry,
    ):
        record = StageRecord(
            addresses=endpoint.addresses,
            join_unix_s=clock.unix_s(),
            stage=spec.stage,
            pinned=spec.stage is not None,
        )
        stage = await _stage(spec, registry, endpoint, record, config.num_stages)
        replica = await build_replica(
            config=config,
            run_id=RunId(spec.run_id),
            stage=stage,
            device=device,
            device_name=spec.device,
            endpoint=endpoint,
            view=lambda: registry.membership.view,
            clock=clock,
        )
        record = msgspec.structs.replace(record, stage=stage, held_round=replica.member.offered_round)
        announcer = Announcer(registry, record, replica)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(replica.run)
            tasks.start_soon(dispatch, endpoint, replica.handlers)
            tasks.start_soon(announcer.run)
            logger.info("server.ready", extra={"stage": stage, "device": spec.device})
            control.ready(stage=stage)


async def _stage(spec: ServerSpec, registry: Registry, endpoint: Endpoint, record: StageRecord, num_stages: int) -> int:
    """The given stage, or the one that needs a server most."""
    if spec.stage is not None:
        return spec.stage
    chooser = StageChooser(registry, endpoint.peer_id, record, num_stages, num_servers=spec.expected_servers or None)
    return await chooser.choose()
