"""The role's entry: connects to the data server, the client and the replicas, and trains until it is told to stop."""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec

from shoal import log
from shoal.clock import SystemClock
from shoal.data.feed import Feed
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.pipeline.driver import StepDriver
from shoal.runtime.control_pipe import RoleControl
from shoal.trainer.loop import TrainerLoop
from shoal.trainer.spec import TrainerSpec
from shoal.transport.dispatch import dispatch
from shoal.transport.unix import open_unix_endpoint


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a trainer.

    Args:
        payload: `TrainerSpec` in msgpack.
        control: told `ready()` once it has said hello to its client.

    Raises:
        ConnectionLost: the data server is gone.
    """
    spec = msgspec.msgpack.decode(payload, type=TrainerSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir))
    config = spec.config()
    clock = SystemClock()
    async with open_unix_endpoint(
        peer_id=Identity(spec.identity_key).peer_id,
        run_id=RunId(spec.run_id),
        role=spec.role,
        path=Path(spec.socket_path),
    ) as endpoint:
        feed = Feed(
            endpoint=endpoint, data_server=spec.data_server, trainer=spec.slot, incarnation=spec.incarnation
        )
        driver = StepDriver(
            endpoint=endpoint,
            trainer=spec.slot,
            incarnation=spec.incarnation,
            window=config.model_pipeline.microbatches_in_flight,
            max_grad_norm=config.diloco.max_grad_norm,
            clock=clock,
            step_timeout_s=config.model_pipeline.forward_timeout_s + config.model_pipeline.backward_timeout_s,
        )
        loop = TrainerLoop(
            endpoint=endpoint,
            feed=feed,
            driver=driver,
            config=config,
            client=spec.client,
            slot=spec.slot,
            incarnation=spec.incarnation,
            clock=clock,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dispatch, endpoint, (driver, feed, loop))
            tasks.start_soon(loop.run)
            control.ready()
            await control.stopping.wait()
            tasks.cancel_scope.cancel()
