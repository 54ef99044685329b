"""What each unit of a run's model costs here: measured, known from an earlier start, or by the family's own figures."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shoal.clock import Clock
from shoal.config.model import NATIVE_FAMILIES
from shoal.config.own_class import kind_and_text, place_of
from shoal.config.schema import Config
from shoal.errors import MisfitError
from shoal.model.device_calls import name_of
from shoal.model.own_errors import configured_name
from shoal.model.profile import Profile, profile_units
from shoal.model.registry import load_exact_family
from shoal.model.stage import Family, checked_unit_costs, stage_units
from shoal.pipeline.torch_device import torch_device
from shoal.server.cost_cache import CostCache, cost_key, microbatch_samples

CostSource = Literal["measured", "cached", "static"]
_MAX_REASON = 400


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """The cost of each unit, and where it comes from.

    Attributes:
        costs: one number for each unit: seconds if measured or cached, relative if static.
        source: "measured" now, "cached" from an earlier start, or "static": the family's own figures.
        warnings: what the user should know, in words.
        is_tied: whether the first and the last unit share a parameter, and are one stage's.
        profile: how the units were measured; None: they were not.
    """

    costs: list[float]
    source: CostSource
    names: list[str]
    is_tied: bool
    warnings: list[str] = field(default_factory=list[str])
    profile: Profile | None = None


def unit_costs(
    config: Config, device: str, clock: Clock, *, measure: bool, cache: CostCache | None = None
) -> UnitCosts:
    """Find out what the units cost; runs on the thread that computes, with its torch threads.

    Args:
        measure: False takes the family's own figures.
        cache: earlier measurements; None: always measure, and keep nothing.

    Raises:
        ConfigError: the model does not fit the configuration, must not be trained, or its figures are no figures.
    """
    family = load_exact_family(config.model, config.data)
    # Says no where it cannot be cut like this.
    stage_units(family, config.num_stages, config.model_pipeline.cut)
    names = [family.unit_name(index) for index in range(family.num_units)]
    static = checked_unit_costs(family)
    if not measure:
        return UnitCosts(static, "static", names, family.is_tied)
    where = torch_device(device)
    key = cost_key(config, device, gpu=name_of(where), code=_code_of(config, family))
    warnings: list[str] = []
    if cache is not None:
        known = cache.load(key, family.num_units)
        if known.costs_s is not None:
            return UnitCosts(known.costs_s, "cached", names, family.is_tied)
        if known.problem is not None:
            warnings.append(f"what the units cost is measured again: {known.problem}")
    try:
        profile = profile_units(
            family, samples=microbatch_samples(config), seed=config.run.seed, device=where, clock=clock
        )
    except MisfitError:
        raise
    except Exception as error:  # noqa: BLE001 - the family may be anybody's code, and the run goes on without figures
        reason = _reason(error, family)[:_MAX_REASON]
        warnings.append(f"the units of the model could not be measured, so its own figures decide the cut ({reason})")
        return UnitCosts(static, "static", names, family.is_tied, warnings)
    problem = None if cache is None else cache.store(key, list(profile.costs_s))
    if problem is not None:
        warnings.append(f"what the units cost cannot be kept for the next start ({problem}); it is measured again then")
    return UnitCosts(list(profile.costs_s), "measured", names, family.is_tied, warnings, profile)


def _reason(error: Exception, family: Family) -> str:
    """Say what was raised, in which unit, and where in the code of its family."""
    named = [*getattr(error, "__notes__", ())[:1], place_of(error, configured_name(type(family)))]
    where = ", ".join(filter(None, named))
    return f"{where}: {kind_and_text(error)}" if where else kind_and_text(error)


def _files_of(family: Family) -> list[str]:
    """The files of the package that a family is of, as far as it is imported: its units may be in another one."""
    package = type(family).__module__.partition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == package]
    return sorted({file for module in modules if isinstance(file := getattr(module, "__file__", None), str)})


def _code_of(config: Config, family: Family) -> str | None:
    """Name the code of somebody's own family by its files; None for ours, which the version names."""
    if config.model.family in NATIVE_FAMILIES:
        return None
    code = hashlib.sha256()
    try:
        for file in _files_of(family):
            code.update(hashlib.sha256(Path(file).read_bytes()).digest())
    except OSError:
        return None
    return code.hexdigest()
