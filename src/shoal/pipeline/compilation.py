"""Compiles a stage where the run's configuration says so; servers, replays and the plain loop do it alike."""

from __future__ import annotations

import logging

from shoal.clock import SystemClock
from shoal.config.schema import Config
from shoal.data.microbatch import usual_sizes
from shoal.model.compiled import compile_stage
from shoal.model.stage import StageModule
from shoal.runtime.user_cache import user_cache

logger = logging.getLogger(__name__)


def compile_configured(module: StageModule, config: Config) -> None:
    """Compile a stage for the microbatches that are usual in the run, or leave it as it is; on the device thread.

    Which sizes those are follows from what all hosts share, so that each replica computes a microbatch in the same way.

    Args:
        module: As for `compile_stage`.
        config: Of the run.

    Raises:
        ConfigError: something is missing on this host, or the stage cannot be compiled.
    """
    if not config.model_pipeline.compile:
        return
    clock = SystemClock()
    begun_s = clock.now_s()
    sizes = usual_sizes(config.diloco.batch_size_per_step, config.model_pipeline.microbatches)
    compile_stage(module, sizes, user_cache("compiled"))
    took_s = round(clock.now_s() - begun_s, 3)
    logger.info("stage.compiled", extra={"stage": module.stage, "sizes": sorted(sizes), "took_s": took_s})
