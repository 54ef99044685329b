"""The role's entry: connects to the data server, the client and the replicas, and trains until it is told to stop."""

from __future__ import annotations

from shoal.clock import SystemClock
from shoal.control.counter_report import counters_reported
from shoal.control.role_start import TrainerSpec, open_role_endpoint
from shoal.pipeline.role_hooks import role_hooks
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import RoleReady
from shoal.trainer.loop import Trainer


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a trainer.

    Args:
        control: is told `RoleReady` once it works; its client hears from it when it has found the data server.
    """
    spec = TrainerSpec.begun(payload)
    clock = SystemClock()
    async with (
        open_role_endpoint(spec) as endpoint,
        counters_reported(endpoint, spec.label, lambda: spec.client, clock),
    ):
        trainer = Trainer(
            config=spec.config(),
            endpoint=endpoint,
            slot=spec.slot,
            generation=spec.generation,
            client=spec.client,
            data_server=spec.data_server,
            clock=clock,
            hooks=role_hooks(spec),
        )
        control.tell(RoleReady())
        await control.until_stopped(trainer.run)
