"""The role's entry of the plain loop that runs beside a swarm, for comparison: `loss/baseline`."""

from __future__ import annotations

import anyio

from shoal.clock import SystemClock
from shoal.control.counter_report import counters_logged
from shoal.control.role_start import BaselineSpec, open_role_endpoint
from shoal.data.feed import Feed
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.launcher_messages import RoleReady
from shoal.trainer.baseline_run import BaselineReport, run_baseline
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.control import Metrics


async def main(payload: bytes, control: RoleControl) -> None:
    """Run the baseline beside a swarm.

    Args:
        control: is told `RoleReady` at once.
    """
    spec = BaselineSpec.begun(payload)
    config = spec.config()
    async with (
        DeviceThread(device_initialiser(spec.device, config.servers.threads[0])) as device,
        open_role_endpoint(spec) as endpoint,
        counters_logged(endpoint),
        anyio.create_task_group() as tasks,
    ):
        clock = SystemClock()
        feed = Feed(endpoint=endpoint, data_server=spec.data_server, trainer=-1, generation=1, clock=clock)
        endpoint.introduce(spec.monitor)

        def report(now: BaselineReport) -> None:
            values = {"step/baseline": float(now.step), "samples_per_s/baseline": now.samples_per_s}
            if now.loss is not None:
                values["loss/baseline"] = now.loss
            if now.eval_loss is not None:
                values["loss/baseline_eval"] = now.eval_loss
            endpoint.post(spec.monitor.peer, Metrics("baseline", endpoint.peer_id, 0, values))

        async def train() -> None:
            await run_baseline(config, feed, device, spec.device, clock, report)
            tasks.cancel_scope.cancel()

        tasks.start_soon(dispatch, endpoint, (feed,))
        # A data server that dies is started again, and the stream of batches goes on where it was.
        tasks.start_soon(feed.run)
        tasks.start_soon(train)
        control.tell(RoleReady())
        await control.stopping.wait()
        tasks.cancel_scope.cancel()
