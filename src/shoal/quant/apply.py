"""Quantises a stage's module in place, as the configuration says. Call it once, after the stage is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig
from shoal.errors import InvariantViolation
from shoal.quant.lsq import ActivationQuantiser, WeightQuantiser
from shoal.quant.rules import plan_module

if TYPE_CHECKING:
    from typing_extensions import TypeIs


def apply_quant(stage_module: nn.Module, quant: QuantConfig | None) -> None:
    """Quantises the weights and inputs of Linear and Conv2d modules; others stay as they are.

    A weight becomes `parametrizations.weight.original` with a step size beside it; an input's step size is
    `input_quantiser.step`. All of them are parameters: trained, averaged, saved as any other. Their initial values
    are a pure function of the weights and the configuration, so all replicas of a stage start equal.

    Args:
        stage_module: A `StageModule` in its final dtype; changed in place. Rules match its `stage` and unit names.
        quant: None changes nothing.

    Raises:
        InvariantViolation: It is quantised already.
    """
    if quant is None:
        return
    stage: int = getattr(stage_module, "stage", 0)
    parts_of: Callable[[str], int] = getattr(stage_module, "parts_of", lambda _unit: 1)
    found = list(cast("Iterable[tuple[str, nn.Module]]", stage_module.named_modules()))
    for name, module in found:
        if not quantisable(module):
            continue
        if parametrize.is_parametrized(module, "weight") or hasattr(module, "input_quantiser"):
            raise InvariantViolation(f"{name} is quantised already")
        plan = plan_module(quant, name.removeprefix("units."), type(module).__name__, stage)
        weight = module.weight
        if plan.activation is not None:
            scheme = plan.activation
            unit_name = name.removeprefix("units.").partition(".")[0]
            module.input_quantiser = ActivationQuantiser(
                scheme.num_bits, signed=scheme.signed, dtype=weight.dtype, num_parts=parts_of(unit_name)
            )
            module.input_quantiser.to(weight.device)
            module.register_forward_pre_hook(_quantise_input)
        if plan.weight is not None:
            scheme = plan.weight
            quantiser = WeightQuantiser(weight, scheme.num_bits, signed=scheme.signed, per_channel=scheme.per_channel)
            parametrize.register_parametrization(module, "weight", quantiser)


def quantisable(module: nn.Module) -> TypeIs[nn.Linear | nn.Conv2d]:
    """Whether a module's weight and input can be quantised."""
    return isinstance(module, nn.Linear | nn.Conv2d)


def module_path(unit_name: str, name: str) -> str:
    """The path by which rules name a module: that of its unit, and its own within the unit, empty for the unit."""
    return f"{unit_name}.{name}" if name else unit_name


def _quantise_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # Looked up at each call, so that a functional call with other parameters or a copied module uses its own.
    quantiser = module.get_submodule("input_quantiser")
    return (quantiser(args[0]), *args[1:])
