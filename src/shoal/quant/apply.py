"""Quantises a stage's module in place, as the configuration says. Call it once, after the stage is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig
from shoal.errors import InvariantViolation
from shoal.quant.lsq import ActivationQuantiser, WeightQuantiser, weight_quantisers
from shoal.quant.targets import plan_of, target_of


def apply_quant(stage_module: nn.Module, quant: QuantConfig | None) -> None:
    """Quantises the weights and inputs of the modules that `quant.targets` names; others stay as they are.

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
    parts_of: Callable[..., int] = getattr(stage_module, "parts_of", _whole)
    found = list(cast("Iterable[tuple[str, nn.Module]]", stage_module.named_modules()))
    for name, module in found:
        if weight_quantisers(module) or hasattr(module, "input_quantiser"):
            raise InvariantViolation(f"{name} is quantised already")
        target = target_of(module)
        if target is None:
            continue
        plan = plan_of(quant, name.removeprefix("units."), module, stage)
        weights = target.parameters(module)
        are_experts = len(weights) > 1
        if plan.activation is not None:
            scheme = plan.activation
            unit_name = name.removeprefix("units.").partition(".")[0]
            module.input_quantiser = ActivationQuantiser(
                scheme.num_bits,
                signed=scheme.signed,
                dtype=weights[0].dtype,
                num_parts=parts_of(unit_name, is_of_experts=are_experts),
            )
            module.input_quantiser.to(weights[0].device)
            module.register_forward_pre_hook(_quantise_input)
        if plan.weight is None:
            continue
        scheme = plan.weight
        for (parameter, channels), weight in zip(target.weights.items(), weights, strict=True):
            quantiser = WeightQuantiser(
                weight, scheme.num_bits, signed=scheme.signed, per_channel=scheme.per_channel, channels=channels
            )
            parametrize.register_parametrization(module, parameter, quantiser)
        if are_experts:
            # Experts ask for their matrices one by one, and each time for all of them.
            module.register_forward_pre_hook(_hold_weights)
            module.register_forward_hook(_release_weights, always_call=True)


def _whole(unit_name: str, *, is_of_experts: bool) -> int:
    """Of a module that is no stage: each sample comes as one."""
    return 1


def _quantise_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # Looked up at each call, so that a functional call with other parameters or a copied module uses its own.
    quantiser = module.get_submodule("input_quantiser")
    return (quantiser(args[0]), *args[1:])


def _hold_weights(module: nn.Module, _args: tuple[Any, ...]) -> None:
    for quantiser in weight_quantisers(module).values():
        quantiser.hold()


def _release_weights(module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
    for quantiser in weight_quantisers(module).values():
        quantiser.release()
