"""A quantised model without what only its training needs: weights are what they are rounded to, and have no step size.

Such a weight is its integers times its scale, with the same bits: both are one product of the same numbers.

The step sizes of inputs stay: a module that rounds its input computes something else than one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig, QuantScheme
from shoal.quant.lsq import usable, weight_quantisers

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32)


class WeightScale(NamedTuple):
    """How a weight that is folded is written as integers.

    Attributes:
        scale: Broadcasts to the weight.
        dtype: The smallest type that holds the integers.
    """

    scale: Tensor
    dtype: torch.dtype

    def integers(self, weight: Tensor) -> Tensor:
        """The integers of a folded weight; times `scale` they are that weight."""
        return (weight / self.scale).round().to(self.dtype)


@torch.no_grad()
def weight_scales(module: nn.Module) -> dict[str, WeightScale]:
    """The scales of a quantised module's weights, by the name that each weight has when it is folded."""
    found: dict[str, WeightScale] = {}
    for path, each in cast("Iterable[tuple[str, nn.Module]]", module.named_modules()):
        for name, quantiser in weight_quantisers(each).items():
            low, high = quantiser.bounds
            fitting = [kind for kind in _INTEGERS if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max]
            found[f"{path}.{name}".removeprefix(".")] = WeightScale(usable(quantiser.scale).clone(), fitting[0])
    return found


def fold_weights(module: nn.Module) -> None:
    """Replace each quantised weight in a module that `apply_quant` has changed, in place; what it computes stays."""
    for each in list(module.modules()):
        for name in weight_quantisers(each):
            parametrize.remove_parametrizations(each, name, leave_parametrized=True)
            with torch.no_grad():
                each.get_parameter(name).add_(0.0)  # no integer is minus zero


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
