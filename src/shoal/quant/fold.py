"""A quantised model without what only its training needs: weights are what they are rounded to, and have no step size.

The step sizes of inputs stay: a module that rounds its input computes something else than one that does not.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig, QuantScheme
from shoal.quant.lsq import weight_quantisers


def fold_weights(module: nn.Module) -> None:
    """Replace each quantised weight in a module that `apply_quant` has changed, in place; what it computes stays."""
    for each in list(module.modules()):
        for name in weight_quantisers(each):
            parametrize.remove_parametrizations(each, name, leave_parametrized=True)


def folded_quant(quant: QuantConfig | None) -> QuantConfig | None:
    """What is left of a configuration for a folded model: how inputs are quantised; None: they are not."""
    if quant is None:
        return None
    inputs = [quant.base.activation_quant, *(rule.activation_quant for rule in quant.rules)]
    if not any(isinstance(scheme, QuantScheme) for scheme in inputs):
        return None
    values = quant.model_dump()
    values["base"]["weight_quant"] = "off"
    for rule in values["rules"]:
        rule["weight_quant"] = None
    return QuantConfig.model_validate(values)
