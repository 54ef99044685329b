"""Learned step size quantisation: the rounding, its gradient, and the modules that hold the step sizes.

Source: Esser et al. 2020, "Learned Step Size Quantization" (arXiv 1902.08153). With a step size s and integer bounds
-Qn and Qp, a value v becomes v^ = round(clip(v / s, -Qn, Qp)) * s. Backwards (sections 2.1 and 2.2):

    d v^ / d v = 1 inside the bounds, 0 outside                                           (straight through)
    d v^ / d s = round(v / s) - v / s inside, -Qn below, Qp above; times g = 1 / sqrt(N * Qp)

N is the number of values that one step size serves: the weights of a tensor or channel, or the features of one sample.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoal.quant.targets import Channels

# Below this a step size would divide to infinity; training may push it there.
_MIN_STEP = 1e-8

_WEIGHT_STEP = re.compile(r"\.parametrizations\.[^.]+\.0\.step$")
_INPUT_STEP = ".input_quantiser.step"

_ROWS = Channels()

# The mean of |v| over a standard normal distribution.
_NORMAL_MEAN_MAGNITUDE = math.sqrt(2 / math.pi)


def usable(step: Tensor) -> Tensor:
    """The step sizes by which values are divided: how large they are, whatever their sign.

    An optimizer whose updates do not shrink with a small parameter, as Adam's, may take one through zero. On the other
    side it goes on as what it was, and is not stuck at zero.
    """
    return step.abs().clamp(min=_MIN_STEP)


class _LsqFunction(torch.autograd.Function):
    """Rounding to a grid, with the gradients of the module docstring. `step` broadcasts to `values`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, step: Tensor, bounds: tuple[int, int], gradient_scale: float) -> Tensor:
        ctx.save_for_backward(values, step)
        ctx.bounds = bounds
        ctx.gradient_scale = gradient_scale
        low, high = bounds
        safe_step = usable(step)
        return (values / safe_step).clamp_(low, high).round_().mul_(safe_step)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad = cast("Tensor", grad_outputs[0])
        values, step = cast("tuple[Tensor, Tensor]", ctx.saved_tensors)
        low, high = cast("tuple[int, int]", ctx.bounds)
        scaled = values / usable(step)
        inside = (scaled > low) & (scaled < high)
        grad_values = grad_step = None
        if ctx.needs_input_grad[0]:
            grad_values = grad * inside
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, scaled.round() - scaled, scaled.clamp(low, high))
            grad_step = (grad * slope).sum_to_size(step.shape) * ctx.gradient_scale
            grad_step = torch.where(step < 0, -grad_step, grad_step)
        return grad_values, grad_step, None, None


# torch's own hints leave the result open.
_lsq = cast("Callable[[Tensor, Tensor, tuple[int, int], float], Tensor]", _LsqFunction.apply)  # pyright: ignore[reportUnknownMemberType]


def lsq_quantise(values: Tensor, step: Tensor, bounds: tuple[int, int], gradient_scale: float) -> Tensor:
    """Rounds `values` to multiples of `step` between `bounds[0] * step` and `bounds[1] * step`.

    Args:
        values: Any shape, floating.
        step: The step sizes; broadcasts to `values`.
        bounds: (-Qn, Qp).
        gradient_scale: The factor g on the gradient of `step`.

    Returns:
        A new tensor of the shape of `values`.
    """
    return _lsq(values, step, bounds, gradient_scale)


def is_step_size(name: str) -> bool:
    """Whether a parameter of a quantised stage is a step size: by its name, all that a flat layout knows of it."""
    return name.endswith(_INPUT_STEP) or _WEIGHT_STEP.search(name) is not None


def integer_bounds(bits: int, *, signed: bool) -> tuple[int, int]:
    """(-Qn, Qp) of `bits` bits: (-2**(b-1), 2**(b-1) - 1) signed, (0, 2**b - 1) unsigned."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


class WeightQuantiser(nn.Module):
    """A parametrization of a weight: one step size for the tensor, each matrix of several, or each output channel.

    A weight that starts at zero, as some residual branches do, has no magnitude to start from, and a step size of zero
    would round all that it learns to zero. Its step size starts as if it were drawn from a normal distribution of
    variance 1 / fan-in; the step size of a channel of zeros starts as the mean of the other channels'.

    Args:
        channels: The weight's dimensions.

    Attributes:
        step: One for each, in a vector, which no optimizer takes for a matrix; starting at 2 * mean(|w|) / sqrt(Qp).
    """

    def __init__(
        self, weight: Tensor, bits: int, *, signed: bool, per_channel: bool, channels: Channels = _ROWS
    ) -> None:
        super().__init__()
        self.bounds = integer_bounds(bits, signed=signed)
        high = self.bounds[1]
        own_dims = channels.dims if per_channel else channels.matrices
        others = [dim for dim in range(weight.ndim) if dim not in own_dims]
        means = weight.detach().abs().mean(dim=others, keepdim=True)
        fan_in = weight.numel() // math.prod(weight.shape[dim] for dim in channels.dims)
        means = _without_zeros(means, _NORMAL_MEAN_MAGNITUDE / math.sqrt(fan_in))
        self.step = nn.Parameter((2 * means / math.sqrt(high)).flatten())
        self.gradient_scale = 1.0 / math.sqrt(weight.numel() / means.numel() * high)
        self._shape = means.shape
        self._holds = False
        self._held: Tensor | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if self._held is not None:
            return self._held
        quantised = lsq_quantise(weight, self.scale, self.bounds, self.gradient_scale)
        if self._holds:
            self._held = quantised
        return quantised

    def hold(self) -> None:
        """Round the weight once for all that ask for it until `release`."""
        self._holds = True

    def release(self) -> None:
        """Forget what is held."""
        self._holds, self._held = False, None

    @property
    def scale(self) -> Tensor:
        """The step sizes in a shape that broadcasts to the weight."""
        return self.step.view(self._shape)


def weight_quantisers(module: nn.Module) -> dict[str, WeightQuantiser]:
    """How a module's own weights are quantised, by the name of the weight."""
    if not parametrize.is_parametrized(module):
        return {}
    chains = cast("Iterable[tuple[str, Sequence[nn.Module]]]", module.parametrizations.items())  # pyright: ignore
    found = {name: chain[0] for name, chain in chains}
    return {name: quantiser for name, quantiser in found.items() if isinstance(quantiser, WeightQuantiser)}


def _without_zeros(means: Tensor, usual: float) -> Tensor:
    """Replaces the mean magnitudes that are zero by that of the others, or, if there are none, by the usual one."""
    others = means[means > 0]
    instead = others.mean() if others.numel() else means.new_tensor(usual)
    return torch.where(means > 0, means, instead)


class ActivationQuantiser(nn.Module):
    """Quantises a module's input (B, ...) with one step size.

    The paper starts the step size at 2 * mean(|v|) / sqrt(Qp) over the first batch. Replicas of a stage see different
    batches but must start equal, so the mean is taken of a standard normal distribution instead: what norms put out.
    From there the step size learns.

    Args:
        num_parts: As how many samples the module gets each one.

    Attributes:
        step: (1,).
    """

    def __init__(self, bits: int, *, signed: bool, dtype: torch.dtype, num_parts: int = 1) -> None:
        super().__init__()
        self._num_parts = num_parts
        self.bounds = integer_bounds(bits, signed=signed)
        initial_step = 2 * _NORMAL_MEAN_MAGNITUDE / math.sqrt(self.bounds[1])
        self.step = nn.Parameter(torch.full((1,), initial_step, dtype=dtype))

    def forward(self, values: Tensor) -> Tensor:
        features = self._num_parts * max(1, values.numel() // max(1, values.shape[0]))
        return lsq_quantise(values, self.step, self.bounds, 1.0 / math.sqrt(features * self.bounds[1]))
