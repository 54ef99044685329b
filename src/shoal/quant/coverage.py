"""Refuses what a model cannot be quantised by: a rule that changes no module, a tied weight, and nothing at all.

A misspelt path would quantise nothing, and nobody would notice. A head that rounds the embedding's weight would leave a
model that is saved nowhere: its embedding is as it is, its head is not, and there is one parameter of both.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import cast

from torch import nn

from shoal.config.quant import QuantConfig, QuantRule, QuantScheme
from shoal.errors import ConfigError
from shoal.quant.rules import matches
from shoal.quant.targets import QUANTISABLE, module_path, plan_of, target_of

_CONDITIONS = ("name_patterns", "class_names", "stages")
"""Of a rule."""
_NEAREST = 3
"""Paths that a message names."""


def require_quantisable(quant: QuantConfig | None, units: Iterable[tuple[str, int, nn.Module]]) -> None:
    """Check that each rule matches a module that can be quantised, that some are, and that no tied weight is.

    Args:
        quant: None quantises nothing.
        units: All units of the model: name, stage, and the unit, whose values do not matter (`model.meta.units_of`).

    Raises:
        ConfigError: Some rules match no module or say nothing, a weight is another module's too, or no module is
            quantised; the message has a line for each.
    """
    if quant is None:
        return  # and nothing is built
    modules: list[tuple[str, int, nn.Module]] = []
    for unit_name, stage, unit in units:
        for name, module in cast("Iterable[tuple[str, nn.Module]]", unit.named_modules()):
            modules.append((module_path(unit_name, name), stage, module))
    problems = (_problem(position, rule, modules) for position, rule in enumerate(quant.rules))
    found = [problem for problem in problems if problem is not None]
    found += _tied(quant, modules)
    if not found and not any(_is_quantised(quant, *each) for each in modules):
        found.append(
            f"quant: no module of this model is quantised: {QUANTISABLE} can be; set quant to null, or give the flag "
            "--disable-quant, to train without"
        )
    if found:
        raise ConfigError("\n".join(found))


def _is_quantised(quant: QuantConfig, path: str, stage: int, module: nn.Module) -> bool:
    plan = plan_of(quant, path, module, stage)
    return plan.weight is not None or plan.activation is not None


def _tied(quant: QuantConfig, modules: list[tuple[str, int, nn.Module]]) -> Iterator[str]:
    """Say of each weight that is quantised and another module's too what to do."""
    owners = Counter(id(weight) for _, _, module in modules for weight in module.parameters(recurse=False))
    for path, stage, module in modules:
        target = target_of(module)
        if target is None or all(owners[id(weight)] == 1 for weight in target.parameters(module)):
            continue
        if plan_of(quant, path, module, stage).weight is not None:
            yield (
                f"quant: the weight of {path} is tied to another module's, and such are not quantised: leave it as it "
                f"is by a rule, {{name_patterns: [{path}], weight_quant: off}}, or part the two with model.tie: false"
            )


def _problem(position: int, rule: QuantRule, modules: list[tuple[str, int, nn.Module]]) -> str | None:
    """Why a rule changes nothing, or None if it changes something."""
    conditions = {name: list(getattr(rule, name)) for name in _CONDITIONS if getattr(rule, name)}
    where = f"quant.rules[{position}] ({', '.join(f'{name}: {value}' for name, value in conditions.items())})"
    matching = [m for m in modules if matches(rule, m[0], type(m[2]).__name__, m[1])]
    if rule.weight_quant is None and rule.activation_quant is None:
        return f"{where}: says nothing about what it matches: give weight_quant or activation_quant"
    targets = {path: target for path, _, module in matching if (target := target_of(module)) is not None}
    is_for_inputs = isinstance(rule.activation_quant, QuantScheme)
    if targets and (not is_for_inputs or any(target.has_input for target in targets.values())):
        return None
    if targets:
        path = next(iter(targets))
        return f"{where}: activation_quant: matches only Embeddings, as {path}, whose input is no number to round"
    if matching:
        path, _, module = matching[0]
        return f"{where}: matches {path}, which is a {type(module).__name__}; only {QUANTISABLE} are quantised"
    paths = sorted(path for path, _, module in modules if target_of(module) is not None)
    near = [near for pattern in rule.name_patterns for near in difflib.get_close_matches(pattern, paths, _NEAREST, 0.4)]
    named = ", ".join(dict.fromkeys(near or paths[:_NEAREST]))
    return f"{where}: matches no module of this model and cut; what can be quantised is called like {named}"
