"""What a run's model is and where it is cut: decided once, on the host of its first client, before any server starts.

    the tokenizer of text is found, or trained by a process                        -> once, without torch
    the classes of images are asked for their names, by a process                  -> once, of a run that begins
    a model of transformers: its config.json is read                               -> at once, without torch
                             a small twin of it proves that it may be cut          -> once, by the profiler
                             the weights that it begins from are read and hashed   -> once, by the profiler
    by hand | one stage | the family's own figures | known from an earlier start   -> at once, without torch
    otherwise a profiler is started, a process that has torch                      -> a moment later

From then on the configuration holds it all, and nobody decides it again: the run's record carries it to other hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shoal.cli.devices import devices_of_servers, name_of_gpu
from shoal.cli.display import print_event
from shoal.cli.exits import USER_ERROR
from shoal.cli.host import SwarmHost
from shoal.config import Config
from shoal.errors import ConfigError, RemoteError
from shoal.events.base import emit, tell
from shoal.events.hosts import ModelCut, ProfilerLost
from shoal.events.servers import UnitCostsProblem, UnitsMeasured
from shoal.model.costs import static_costs
from shoal.model.hf.described import OF_TRANSFORMERS, with_hf_config
from shoal.model.partition import counts_by_cost
from shoal.runtime.launcher_messages import CostsFound
from shoal.server.cost_cache import CostCache, cost_key

logger = logging.getLogger(__name__)


def has_cut(config: Config) -> bool:
    """Whether it is decided which stage holds which units."""
    return config.num_stages == 1 or config.model_pipeline.cut is not None


def is_settled(config: Config) -> bool:
    """Whether nothing is left for a profiler: the cut is decided, and no model has to be proven."""
    return has_cut(config) and config.model.family not in OF_TRANSFORMERS


def with_known_cut(config: Config, cache: CostCache | None = None) -> Config:
    """Return the configuration with model and tokenizer, and with the cut if that can be told without torch.

    Raises:
        ConfigError: model or tokenizer are not there, or do not go together, or it cannot be cut into so many stages.
        StorageError: the tokenizer cannot be kept.
        RemoteError: who trains it was killed.
    """
    config = config.model_copy(update={"model": with_hf_config(config.model)})
    if config.data.tokenizer is not None:
        from shoal.data.text_corpus import with_tokenizer  # most runs have none

        config = with_tokenizer(config, print_event)
    if config.data.task_type == "speech" and config.data.characters is None:
        from shoal.data.speech import with_characters

        config = with_characters(config)
    if has_cut(config):
        return config
    costs = static_costs(config.model, config.data)
    if costs is None:
        return config  # only the family itself knows
    if not config.run.deterministic:
        device = profiled_device(config)
        key = cost_key(config, device, gpu=name_of_gpu(device))
        # A profiler meets a damaged file again, and says so.
        costs = (cache or CostCache.of_user()).load(key, config.model.num_units).costs_s
    return config if costs is None else with_cut(config, counts_by_cost(costs, config.num_stages))


def with_class_names(config: Config) -> Config:
    """Return the configuration of a run that begins, with the names of its classes where it has images.

    Raises:
        ConfigError, RemoteError: as `with_classes`.
    """
    if config.data.task_type not in ("cv", "image_gen"):
        return config
    from shoal.data.class_names import with_classes  # most runs have none

    return with_classes(config, print_event)


async def with_profiled_cut(config: Config, host: SwarmHost, notice: Callable[[str], None]) -> Config:
    """Return the configuration with the cut, after a profiler has found out what the units cost, and proven the model.

    Args:
        config: that is not settled.

    Raises:
        ConfigError: the model does not fit the configuration, or must not be cut.
        RemoteError: the profiler ended before it had said anything.
    """
    measure = not config.run.deterministic and not has_cut(config)
    try:
        found = await _unit_costs(config, host, measure=measure)
    except RemoteError as error:
        if not measure:
            raise
        # It was killed, as by a system that is short of memory: the figures of the family take none.
        tell(logger, ProfilerLost(str(error)), notice)
        found = await _unit_costs(config, host, measure=False)
    for warning in found.warnings:
        tell(logger, UnitCostsProblem(warning), notice)
    if found.weights is not None:
        config = with_weights(config, found.weights)
    if has_cut(config):
        return config
    counts = counts_by_cost(found.costs, config.num_stages, is_tied=found.is_tied)
    if found.source == "measured":
        tell(logger, UnitsMeasured(found.elapsed_s, list(counts)), notice)
    return with_cut(config, counts)


async def _unit_costs(config: Config, host: SwarmHost, *, measure: bool) -> CostsFound:
    profiler = await host.start_profiler(profiled_device(config), measure=measure)
    async for event in profiler.events:
        if isinstance(event, CostsFound):
            return event
    status = await profiler.wait()
    reason = profiler.last_error or str(status)
    if status.code == USER_ERROR:
        raise ConfigError(reason)
    raise RemoteError(f"the profiler ended early: {reason}")


def profiled_device(config: Config) -> str:
    """Return the device on which units are measured: that of the first server.

    Raises:
        ConfigError: there is no such device.
    """
    return devices_of_servers(config)[0]


def with_cut(config: Config, counts: Sequence[int]) -> Config:
    """Return the configuration with the cut."""
    pipeline = config.model_pipeline.model_copy(update={"cut": tuple(counts)})
    return config.model_copy(update={"model_pipeline": pipeline})


def with_weights(config: Config, weights: Sequence[str]) -> Config:
    """Return the configuration with what the weights hash to that the run begins from, unit by unit."""
    return config.model_copy(update={"model": config.model.model_copy(update={"weights": tuple(weights)})})


def log_cut(config: Config) -> None:
    """Say in the launcher's log where the model is cut."""
    emit(logger, ModelCut(list(config.model_pipeline.cut or ()), config.num_stages))
