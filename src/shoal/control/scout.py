"""The role that joins a swarm ahead of a host's servers: it tells the launcher which run there is, and when it is over.

    join the DHT -> `ready(run_id, configuration)` -> watch -> `run_over(reason)`

It computes nothing. Servers can only be started once the run is known, because they take its configuration.
"""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import msgspec

from shoal import log
from shoal.clock import SystemClock
from shoal.control.join import join_swarm
from shoal.control.registry import Registry
from shoal.control.run_config import unpack_configuration
from shoal.control.scout_spec import ScoutSpec
from shoal.errors import BootstrapError
from shoal.identity import Identity
from shoal.runtime.control_pipe import RoleControl
from shoal.swarm.view import Run

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a scout.

    Args:
        payload: `ScoutSpec` in msgpack.
        control: told `ready(run_id=..., configuration=...)`, later `run_over(reason=..., ended=...)`.

    Raises:
        BootstrapError: no initial peer answered, or none of them knows a run.
        RecordRejected: the run's configuration cannot be read.
    """
    spec = msgspec.msgpack.decode(payload, type=ScoutSpec)
    log.configure(spec.log_path.stem, Path(spec.log_dir))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_scout, spec, control)
        await control.stopping.wait()
        tasks.cancel_scope.cancel()


async def _scout(spec: ScoutSpec, control: RoleControl) -> None:
    config = spec.config()
    async with join_swarm(spec, Identity(spec.identity_key), control, SystemClock()) as registry:
        run = await _running(registry, config.network.bootstrap_timeout_s, config.experiment_prefix)
        logger.info("run.found", extra={"run": run.run_id, "client": run.client})
        control.ready(run_id=run.run_id, configuration=unpack_configuration(run.config))
        now = await registry.membership.wait_until(lambda view: _replaces(view.run, run))
        ended = now.run is None or now.run.run_id == run.run_id
        reason = f"run {run.run_id} has ended" if ended else f"a new run has begun in place of {run.run_id}"
        logger.info("run.over", extra={"run": run.run_id, "reason": reason})
        control.event("run_over", reason=reason, ended=ended)
        await control.stopping.wait()


def _replaces(now: Run | None, run: Run) -> bool:
    """Whether `run` will not go on. One that is not announced any more may: its client may be started again."""
    return now is not None and (now.ended or now.run_id != run.run_id)


async def _running(registry: Registry, timeout_s: float, prefix: str) -> Run:
    with anyio.move_on_after(timeout_s):
        view = await registry.membership.wait_for(lambda view: view.run is not None and not view.run.ended)
        if view.run is not None:
            return view.run
    raise BootstrapError(
        f"the initial peers answered, but within {timeout_s:.0f} s none of them knew a run with experiment_prefix = "
        f"{prefix} and this swarm key: use the --experiment-prefix of the client, compare `shoal key fingerprint`"
    )
