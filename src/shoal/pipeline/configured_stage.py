"""A stage as a run's configuration says it: built, quantised, on its device, compiled. Servers, replays and the plain
loop build it alike."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.checkpoint.start_weights import fill_start, prepared
from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.data.microbatch import usual_sizes
from shoal.events.base import emit
from shoal.events.steps import StageCompiled, StageCompiledInVain
from shoal.model.compiled import compile_stage
from shoal.model.precision import autocast_of
from shoal.model.stage import Family, StageModule, build_stage
from shoal.pipeline.torch_device import torch_device
from shoal.quant.apply import apply_quant
from shoal.runtime.user_cache import user_cache

logger = logging.getLogger(__name__)


Fill = Callable[[Config, StageModule], None]
"""Gives a stage the parameters of D_0, where these do not follow from the seed."""


def configured_stage(
    config: Config, family: Family, stage: int, device_name: str, fill: Fill = fill_start
) -> StageModule:
    """Build a stage with the parameters of D_0; runs on the device thread.

    Args:
        device_name: As torch names it.

    Raises:
        ConfigError: the model does not fit the configuration, there is no such device, or the stage cannot be compiled.
        WeightsMissing: the run begins from weights that are not on this host.
    """
    device, pipeline = torch_device(device_name), config.model_pipeline
    autocast = autocast_of(config.data.precision, device)
    module = build_stage(
        family,
        stage,
        pipeline.stages,
        seed=config.run.seed,
        cut=pipeline.cut,
        autocast=autocast,
        prepare=prepared(config, family),
    )
    fill(config, module)
    apply_quant(module, config.quant)
    module.to(device)
    if pipeline.compile:
        _compile(module, config)
    return module


def tell_if_in_vain(config: Config, stage: int, cap: int | None) -> None:
    """Say so if a stage is compiled for microbatches that its server never gets.

    Args:
        cap: the most samples that the server takes at a time; None: any number.
    """
    if cap is None or not config.model_pipeline.compile:
        return
    sizes = _sizes(config)
    if cap < min(sizes):
        emit(logger, StageCompiledInVain(stage, cap, sorted(sizes)))


def _sizes(config: Config) -> frozenset[int]:
    return usual_sizes(config.diloco.batch_size_per_step, config.model_pipeline.microbatches)


def _compile(module: StageModule, config: Config) -> None:
    """Compile a stage for the microbatches that are usual in the run.

    Which sizes those are follows from what all hosts share, so that each replica computes a microbatch in the same way.
    """
    clock = SystemClock()
    begun_s = clock.now_s()
    sizes = _sizes(config)
    compile_stage(module, sizes, user_cache("compiled"))
    took_s = round(clock.now_s() - begun_s, 3)
    emit(logger, StageCompiled(module.stage, sorted(sizes), took_s))
