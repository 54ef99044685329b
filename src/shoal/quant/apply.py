"""Quantises a stage's module in place, as the configuration says. Call it once, after the stage is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig
from shoal.errors import InvariantViolation
from shoal.quant.lsq import ActivationQuantiser, WeightQuantiser
from shoal.quant.rules import plan_module


def apply_quant(stage_module: nn.Module, quant: QuantConfig | None) -> None:
    """Quantises the weights and inputs of Linear and Conv2d modules; others stay as they are.

    A weight becomes `parametrizations.weight.original` with a step size beside it; an input's step size is
    `input_quantiser.step`. All of them are parameters: trained, averaged, saved as any other. Their initial values
    are a pure function of the weights and the configuration, so all replicas of a stage start equal.

    Args:
        stage_module: A `StageModule` (rules match its `stage` and the names of its units), in its final dtype. Changed
            in place.
        quant: The section `quant`; None changes nothing.

    Raises:
        InvariantViolation: It is quantised already.
    """
    if quant is None:
        return
    stage: int = getattr(stage_module, "stage", 0)
    found = list(cast("Iterable[tuple[str, nn.Module]]", stage_module.named_modules()))
    for name, module in found:
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if parametrize.is_parametrized(module, "weight") or hasattr(module, "input_quantiser"):
            raise InvariantViolation(f"{name} is quantised already")
        plan = plan_module(quant, name.removeprefix("units."), type(module).__name__, stage)
        weight = module.weight
        if plan.activation is not None:
            scheme = plan.activation
            module.input_quantiser = ActivationQuantiser(scheme.num_bits, signed=scheme.signed, dtype=weight.dtype)
            module.input_quantiser.to(weight.device)
            module.register_forward_pre_hook(_quantise_input)
        if plan.weight is not None:
            scheme = plan.weight
            quantiser = WeightQuantiser(weight, scheme.num_bits, signed=scheme.signed, per_channel=scheme.per_channel)
            parametrize.register_parametrization(module, "weight", quantiser)


def _quantise_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # Looked up at each call, so that a functional call with other parameters or a copied module uses its own.
    quantiser = module.get_submodule("input_quantiser")
    return (quantiser(args[0]), *args[1:])
