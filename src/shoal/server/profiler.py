"""The role that finds out what the units of the model cost before any server starts; it says so and ends.

It is a process of its own because the launcher imports no torch, and because a family's own code runs in it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from shoal import log
from shoal.checkpoint.start_weights import StartWeights
from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.control.role_start import ProfilerSpec
from shoal.events.base import emit
from shoal.events.servers import UnitCostsEstimated, UnitCostsKnown, UnitCostsProblem, WeightsRead
from shoal.pipeline.torch_device import device_initialiser
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.launcher_messages import CostsFound
from shoal.server.cost_cache import CostCache
from shoal.server.unit_costs import UnitCosts, unit_costs

logger = logging.getLogger(__name__)


async def main(payload: bytes, control: RoleControl) -> None:
    """Run a profiler.

    Args:
        control: is told `CostsFound`.

    Raises:
        ConfigError: the model does not fit the configuration, or there is no such device.
    """
    spec = msgspec.msgpack.decode(payload, type=ProfilerSpec)
    config, clock = spec.config(), SystemClock()
    log.configure("profiler_0", Path(spec.log_dir), config.log_level)
    async with DeviceThread(device_initialiser(spec.device, config.servers.threads[0])) as device:

        def find() -> UnitCosts:
            return unit_costs(config, spec.device, clock, measure=spec.measure, cache=CostCache.of_user())

        found = await device.run(find)
        weights = await device.run(_weights, config) if config.lacks_weights else None
    profile = found.profile
    elapsed_s = 0.0 if profile is None else round(profile.elapsed_s, 3)
    if profile is not None and profile.num_estimated:
        emit(logger, UnitCostsEstimated(profile.num_estimated))
    for warning in found.warnings:
        emit(logger, UnitCostsProblem(warning))
    emit(logger, UnitCostsKnown(found.source, elapsed_s, found.costs))
    control.tell(CostsFound(found.costs, found.source, elapsed_s, found.warnings, found.is_tied, weights))


def _weights(config: Config) -> list[str]:
    begun_s = SystemClock().now_s()
    weights = StartWeights(config).digests()
    took_s = round(SystemClock().now_s() - begun_s, 3)
    origin = config.model.name_or_path if config.model.pretrained else None
    emit(logger, WeightsRead(origin or f"run.seed = {config.run.seed}", config.model.commit, took_s))
    return list(weights)
