"""Units without memory: built on torch's meta device, with shapes and without values, to count and compare them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.events.base import emit
from shoal.events.servers import UnitBuilt
from shoal.model.hf.lora import lora_of
from shoal.model.own_errors import asked, require_module
from shoal.model.partition import StageUnits
from shoal.model.registry import load_family
from shoal.model.seeding import seeded, unit_seed
from shoal.model.stage import Family, stage_units
from shoal.model.valueless import WithoutValues

if TYPE_CHECKING:
    from shoal.config.schema import Config

logger = logging.getLogger(__name__)


def units_of(config: Config) -> Iterator[tuple[str, int, nn.Module]]:
    """Build all units of a run's model without memory, stage by stage; yields name, stage and unit.

    What units of a stage share is one parameter, as where it is trained.

    Raises:
        ConfigError: The model does not fit the configuration.
    """
    family = load_family(config.model, config.data)
    for stage, units in enumerate(stage_units(family, config.num_stages, config.model_pipeline.cut)):
        for name, unit in build_units_without_values(family, units, config).items():
            yield name, stage, unit


def trained_names(config: Config) -> Iterator[str]:
    """Yield the names of all parameters that a run trains, from their units on.

    Raises:
        ConfigError: As `units_of`.
    """
    for unit_name, _, unit in units_of(config):
        for name, parameter in unit.named_parameters():
            if parameter.requires_grad:
                yield f"{unit_name}.{name}"


def build_units_without_values(family: Family, units: StageUnits, config: Config) -> nn.ModuleDict:
    """Build the units of a stage on the meta device, by name; those that share a parameter with that one, and with the
    adapters that the run trains."""
    built = {family.unit_name(i): build_without_values(family, i, config.run.seed).to("meta") for i in units.indices}
    if (lora := lora_of(config, family)) is not None:
        for index in units.indices:
            lora.adapt(index, built[family.unit_name(index)])
    found = nn.ModuleDict(built)
    family.tie(found)
    return found


def build_without_values(family: Family, index: int, seed: int) -> nn.Module:
    """Build a unit without memory. A unit that cannot be built this way is built for real, on the CPU.

    Args:
        seed: Of the run, for a unit that has to be built for real.

    Raises:
        MisfitError: Code of somebody's own family raises, or gives no module.
    """
    kind = type(family)
    with asked(kind, f"build_unit({index})"):
        try:
            with torch.device("meta"), WithoutValues():
                return require_module(kind, index, family.build_unit(index))
        except (RuntimeError, ValueError, TypeError) as error:
            emit(logger, UnitBuilt(index, f"{type(error).__name__}: {error}"[:200]))
        with seeded(unit_seed(seed, index)):
            return require_module(kind, index, family.build_unit(index))
