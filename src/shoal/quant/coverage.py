"""Refuses rules that change no module of the model: a misspelt path would quantise nothing, and nobody would notice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import cast

from torch import nn

from shoal.config.quant import QuantConfig, QuantRule
from shoal.errors import ConfigError
from shoal.quant.apply import module_path, quantisable
from shoal.quant.rules import matches

_CONDITIONS = ("name_patterns", "class_names", "stages")
"""Of a rule."""
_NEAREST = 3
"""Paths that a message names."""


def require_matches(quant: QuantConfig | None, units: Iterable[tuple[str, int, nn.Module]]) -> None:
    """Check that each rule matches a module that can be quantised.

    Args:
        quant: None has no rules.
        units: All units of the model: name, stage, and the unit, whose values do not matter (`model.meta.units_of`).

    Raises:
        ConfigError: Some rules match no module; the message has a line for each, with the nearest names.
    """
    if quant is None or not quant.rules:
        return  # and nothing is built
    modules: list[tuple[str, int, nn.Module]] = []
    for unit_name, stage, unit in units:
        for name, module in cast("Iterable[tuple[str, nn.Module]]", unit.named_modules()):
            modules.append((module_path(unit_name, name), stage, module))
    problems = (_problem(position, rule, modules) for position, rule in enumerate(quant.rules))
    found = [problem for problem in problems if problem is not None]
    if found:
        raise ConfigError("\n".join(found))


def _problem(position: int, rule: QuantRule, modules: list[tuple[str, int, nn.Module]]) -> str | None:
    """Why a rule changes nothing, or None if it changes something."""
    matching = [m for m in modules if matches(rule, m[0], type(m[2]).__name__, m[1])]
    if any(quantisable(module) for _, _, module in matching):
        return None
    conditions = {name: list(getattr(rule, name)) for name in _CONDITIONS if getattr(rule, name)}
    where = f"quant.rules[{position}] ({', '.join(f'{name}: {value}' for name, value in conditions.items())})"
    if matching:
        path, _, module = matching[0]
        return f"{where}: matches {path}, which is a {type(module).__name__}; only Linear and Conv2d are quantised"
    paths = sorted(path for path, _, module in modules if quantisable(module))
    near = [near for pattern in rule.name_patterns for near in difflib.get_close_matches(pattern, paths, _NEAREST, 0.4)]
    named = ", ".join(dict.fromkeys(near or paths[:_NEAREST]))
    return f"{where}: matches no module of this model and cut; its Linear and Conv2d modules are called like {named}"
