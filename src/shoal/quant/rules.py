"""How each module is quantised: the base of the configuration, changed by rules for path, type and stage. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from shoal.config.quant import QuantConfig, QuantRule, QuantScheme

_Quant = QuantScheme | Literal["off"]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What is quantised in one module, and how; None: not at all."""

    weight: QuantScheme | None
    activation: QuantScheme | None


def plan_module(quant: QuantConfig, path: str, class_name: str, stage: int, *, in_base: bool = True) -> ModulePlan:
    """What the configuration says about one module.

    Weights and inputs are decided separately, as in a style sheet: of the rules that match and say something about
    them, the most specific one counts (`_specificity`), of equally specific ones the last; without any, the base.

    Args:
        path: Of the module within the model, from its unit on: "block_0.mlp.up". It does not depend on the cut.
        class_name: "Linear" or "Conv2d".
        in_base: False: only rules count.
    """
    base: tuple[_Quant, _Quant] = (quant.base.weight_quant, quant.base.activation_quant)
    weight, activation = base if in_base else ("off", "off")
    matching = [rule for rule in quant.rules if matches(rule, path, class_name, stage)]
    for rule in sorted(matching, key=lambda rule: _specificity(rule, path)):
        weight = weight if rule.weight_quant is None else rule.weight_quant
        activation = activation if rule.activation_quant is None else rule.activation_quant
    return ModulePlan(None if weight == "off" else weight, None if activation == "off" else activation)


def matches(rule: QuantRule, path: str, class_name: str, stage: int) -> bool:
    """Whether every condition that the rule gives holds for a module; the arguments are those of `plan_module`."""
    return (
        (not rule.stages or stage in rule.stages)
        and (not rule.class_names or class_name in rule.class_names)
        and (not rule.name_patterns or any(fnmatchcase(path, pattern) for pattern in rule.name_patterns))
    )


def _specificity(rule: QuantRule, path: str) -> tuple[int, bool, bool]:
    """How narrowly a matching rule points at a module: by its path, then by its type, then by its stage.

    Of two patterns that match a path the one with more characters of its own, neither `*` nor `?`, is the narrower one.
    """
    found = [pattern for pattern in rule.name_patterns if fnmatchcase(path, pattern)]
    own_characters = max((len(pattern) - pattern.count("*") - pattern.count("?") for pattern in found), default=0)
    return own_characters, bool(rule.class_names), bool(rule.stages)
