"""The loss of routers that send tokens to experts: small where every expert gets as many tokens, layer by layer.

    router --logits--> loss of the layer --.
       '----weights of the experts taken---+--> the same weights, whose backward also begins the loss's own

A stage that has no loss to add to trains its routers all the same: the gradient begins at each router. The loss is that
of Fedus et al. 2021 (arXiv:2101.03961), equation 4, for each layer by itself, with K experts a token as Megatron-LM has
it. (`load_balancing_loss_func` of transformers is one product over all layers, which cannot be cut.)

Shapes: N tokens, E experts, K experts that a token takes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.device_calls import wide
from shoal.wire.messages.base import RouterReport


class RouterPass(NamedTuple):
    """What one layer has come to in a forward: its loss, a scalar, and the tokens of each expert (E), in float."""

    loss: Tensor
    loads_E: Tensor


def router_loss(logits_NE: Tensor, num_taken: int) -> RouterPass:
    """Return E times the sum of f_e * P_e: 1 where all is even, E / K where each token takes the same experts alone.

    f_e is expert e's share of what is taken, P_e its mean probability, through which alone the gradient goes.

    Args:
        num_taken: K.
    """
    wide = logits_NE if logits_NE.dtype == torch.float64 else logits_NE.float()
    probabilities_NE = F.softmax(wide.flatten(0, -2), dim=-1)
    with torch.no_grad():
        taken_NK = probabilities_NE.topk(num_taken, dim=-1).indices
        loads_E = torch.zeros_like(probabilities_NE).scatter(1, taken_NK, 1.0).sum(0)
        shares_E = loads_E / taken_NK.numel()
    num_experts = probabilities_NE.shape[1]
    return RouterPass((shares_E * probabilities_NE.mean(0)).sum() * num_experts, loads_E)


class RouterLosses:
    """The routers of a stage, in the order of its layers.

    Args:
        coefficient: Of the loss, in each layer; 0: it is only reported.
        num_taken: K.
    """

    def __init__(self, coefficient: float, num_taken: int) -> None:
        self.coefficient = coefficient
        self._num_taken = num_taken
        self._scale: Tensor | None = None
        self._passes: list[RouterPass] = []

    def attach(self, router: nn.Module, index: int) -> None:
        """Take a router in.

        Args:
            index: Of the logits (N, E) in the tuple that it puts out; another one of its tensors is what is used.
        """

        def hook(_module: nn.Module, _args: object, output: Sequence[Tensor]) -> Sequence[Tensor] | None:
            return None if self._scale is None else self._with_loss(output, index, self._scale)

        # torch's hint leaves open what a module puts out.
        router.register_forward_hook(cast("Any", hook))

    @contextmanager
    def weighed(self, weight: float, device: torch.device) -> Generator[list[RouterPass]]:
        """Inside, one forward may run, whose backward adds `weight` times the losses' gradients, whenever it runs.

        Yields:
            A list that has, after the forward, what each layer has come to.
        """
        # A GPU of Apple has no float64: there the losses' own type, to which it would be cast anyway.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._scale, self._passes = torch.full((), self.coefficient * weight, dtype=dtype, device=device), []
        try:
            yield self._passes
        finally:
            self._scale, self._passes = None, []

    def _with_loss(self, output: Sequence[Tensor], index: int, scale: Tensor) -> Sequence[Tensor]:
        found = router_loss(output[index], self._num_taken)
        self._passes.append(RouterPass(found.loss.detach(), found.loads_E))
        if not self.coefficient:
            return output
        used = next(place for place, each in enumerate(output) if place != index and each.is_floating_point())
        scaled = found.loss * scale.to(found.loss.dtype)
        given = cast("Tensor", _BeginsAt.apply(output[used], scaled))  # pyright: ignore[reportUnknownMemberType]
        return (*output[:used], given, *output[used + 1 :])


class RouterTotals:
    """What the routers of a stage have come to in a step."""

    def __init__(self) -> None:
        self._sums: list[RouterPass] = []

    def add(self, weight: float, passes: Sequence[RouterPass]) -> None:
        """A microbatch's forward has run, with that weight in its step."""
        weighed = [RouterPass(each.loss * weight, each.loads_E) for each in passes]
        self._sums = (
            [RouterPass(*(a + b for a, b in zip(*pair, strict=True))) for pair in zip(self._sums, weighed, strict=True)]
            if self._sums
            else weighed
        )

    def reports(self) -> tuple[RouterReport, ...]:
        """Return them in the order of the layers."""
        if not self._sums:
            return ()
        # At once, because a device stops for each number that is read.
        losses = torch.stack([wide(each.loss) for each in self._sums]).cpu()
        variations = torch.stack([_variation(each.loads_E) for each in self._sums]).cpu()
        return tuple(RouterReport(float(loss), float(cv)) for loss, cv in zip(losses, variations, strict=True))


class _BeginsAt(torch.autograd.Function):
    """A tensor as it is; whoever differentiates it differentiates a scalar too, from a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scalar: Tensor) -> Tensor:
        ctx.save_for_backward(scalar)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        return cast("Tensor", gradients[0]), torch.ones_like(ctx.saved_tensors[0])


def _variation(loads_E: Tensor) -> Tensor:
    """The coefficient of variation: the standard deviation over the mean."""
    loads_E = wide(loads_E)
    return loads_E.std(correction=0) / loads_E.mean()
