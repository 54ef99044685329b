"""Activation functions that transformers writes out as several operations: computed again in the backward pass.

Of a formula like that of `gelu_new` autograd keeps what each operation needs, six tensors as wide as the input. It is a
matter of elements, so computing it again costs little beside the matrices around it, and comes to the same bits: only
the input is kept (as in Chen et al., 2016, arXiv 1604.06174, for one module).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import activations

_WRITTEN_OUT: Final = (
    activations.NewGELUActivation,
    activations.FastGELUActivation,
    activations.QuickGELUActivation,
    activations.AccurateGELUActivation,
)


def recompute_activations(layers: Iterable[nn.Module]) -> None:
    """Have these layers keep the input alone of each such activation function. What they compute stays as it is."""
    for layer in layers:
        for module in list(layer.modules()):
            for name, child in module.named_children():
                if isinstance(child, _WRITTEN_OUT):
                    setattr(module, name, _Recomputed(child))


class _Recomputed(nn.Module):
    """An activation function without parameters, computed again when its gradient is asked for."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, values: Tensor) -> Tensor:
        # A compiler fuses the operations, and chooses itself what it computes again.
        if torch.compiler.is_compiling():
            return self._function(values)
        return cast("Tensor", _Recomputing.apply(values, self._function))


class _Recomputing(torch.autograd.Function):
    """y = function(x), for a function that has no parameters and draws no random numbers."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        kind = values.device.type
        ctx.save_for_backward(values)
        ctx.function = function
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        return function(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            output = ctx.function(values)
        return torch.autograd.grad(output, values, gradients)[0], None
