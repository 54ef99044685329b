"""The role's entry: joins the swarm, has its data server started, runs the rounds, sums the run up."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec

from shoal import log
from shoal.client.client import Client
from shoal.client.spec import ClientSpec
from shoal.clock import Clock, SystemClock
from shoal.config.shared import shared_configuration
from shoal.control.join import join_swarm
from shoal.control.records import ClientRecord, RunRecord
from shoal.control.registry import Registry
from shoal.control.role_endpoint import open_role_endpoint
from shoal.control.run_config import pack_configuration
from shoal.errors import ControlError
from shoal.identity import Identity
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.process_info import process_age_s
from shoal.transport.base import Endpoint


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a client.

    Args:
        payload: `ClientSpec` in msgpack.
        control: asked for a data server and trainers; told `ready()`, and at the end `summary(summary=...)`, also when
            the run is interrupted or fails.

    Raises:
        ShoalError: the run failed.
    """
    spec = msgspec.msgpack.decode(payload, type=ClientSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir))
    identity, clock = Identity(spec.identity_key), SystemClock()
    async with open_role_endpoint(spec, identity) as endpoint:
        reply = await control.request("start_data_server")
        if "error" in reply:
            raise ControlError(f"the data server could not be started: {reply['error']}")
        async with join_swarm(spec, identity, control, clock) as registry:
            run = _announced_run(spec, clock)
            registry.advertise(run)
            await _train(_build(spec, identity, endpoint, registry, control, clock), control)
            # Its servers may go; without this word they would wait for the client to come back.
            await registry.conclude(msgspec.structs.replace(run, ended=True))


def _announced_run(spec: ClientSpec, clock: Clock) -> RunRecord:
    config = spec.config()
    return RunRecord(spec.run_id, config.num_stages, clock.unix_s(), pack_configuration(shared_configuration(config)))


def _build(
    spec: ClientSpec,
    identity: Identity,
    endpoint: Endpoint,
    registry: Registry,
    control: RoleControl,
    clock: Clock,
) -> Client:
    config = spec.config()
    registry.advertise(ClientRecord(endpoint.addresses, clock.unix_s()))
    return Client(
        config=config,
        run_id=spec.run_id,
        log_dir=Path(spec.log_dir),
        identity=identity,
        endpoint=endpoint,
        membership=registry.membership,
        launcher=control,
        data_server=spec.data_server,
        monitor=spec.monitor,
        clock=clock,
        age_s=lambda: process_age_s(spec.launcher_pid),
        expected_servers=spec.expected_servers,
        patient=spec.patient,
        notice=lambda text: control.event("notice", text=text),
    )


async def _train(client: Client, control: RoleControl) -> None:
    """Run the rounds until they are done, fail, or the launcher says stop; then say what was reached."""
    exit_reason = "failed"
    try:
        async with anyio.create_task_group() as tasks:

            async def stop_when_told() -> None:
                nonlocal exit_reason
                await control.stopping.wait()
                exit_reason = "interrupted"
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_when_told)
            control.ready()
            await client.run()
            exit_reason = "done"
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            control.event("summary", summary=await client.summary(exit_reason))
