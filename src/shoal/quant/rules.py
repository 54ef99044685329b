"""How each module is quantised: the base of the configuration, changed by rules for path, type and stage. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shoal.config.quant import QuantConfig, QuantRule, QuantScheme


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What is quantised in one module, and how; None: not at all."""

    weight: QuantScheme | None
    activation: QuantScheme | None


def plan_module(quant: QuantConfig, path: str, class_name: str, stage: int) -> ModulePlan:
    """What the configuration says about one module.

    Every condition that a rule gives must hold for it to match. Of the rules that match only the last one counts;
    what it leaves open is as in the base.

    Args:
        quant: The section `quant`.
        path: Of the module within the model, from its unit on: "block_0.mlp.up". It does not depend on the cut.
        class_name: "Linear" or "Conv2d".
        stage: The stage that holds it.
    """
    weight, activation = quant.base.weight_quant, quant.base.activation_quant
    for rule in reversed(quant.rules):
        if _matches(rule, path, class_name, stage):
            weight = weight if rule.weight_quant is None else rule.weight_quant
            activation = activation if rule.activation_quant is None else rule.activation_quant
            break
    return ModulePlan(None if weight == "off" else weight, None if activation == "off" else activation)


def _matches(rule: QuantRule, path: str, class_name: str, stage: int) -> bool:
    return (
        (not rule.stages or stage in rule.stages)
        and (not rule.class_names or class_name in rule.class_names)
        and (not rule.name_patterns or any(fnmatchcase(path, pattern) for pattern in rule.name_patterns))
    )
