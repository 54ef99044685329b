"""The loss of a last unit that computes each position by itself, a chunk of positions at a time.

    what the last unit takes -> chunk -> last unit -> logits -> loss -> gradients     then the next chunk

So the logits of one chunk live, not those of a microbatch. Gradients are computed beside the loss, since a backward
that came later would need all logits once more (Liger Kernel does the same, arXiv:2410.10989); the backward scales them
and gives them away. Asked again, it computes them again.

Shapes: B samples, P positions of a sample, N = B * P, C what the last unit takes of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FLOAT_BYTES: Final = 4
_LOGITS_BYTES: Final = 64 * 2**20
# Where the logits of so many tokens fit, a token has no more of them than a block keeps of it.
_MANY_TOKENS: Final = 4096
# Each chunk goes over all weights of the last unit and all their gradients: fewer tokens are not worth that.
_LEAST_TOKENS: Final = 256
# As in `Family.loss`.
_IGNORED: Final = -100


def chunk_tokens(vocabulary: int, wanted: int | None) -> int | None:
    """Return how many tokens a chunk has; None: the vocabulary is so small that there are no chunks.

    Args:
        wanted: `model.loss_chunk_tokens`; None: as many as have 64 MiB of logits, and 256 at least.
    """
    if wanted is not None:
        return wanted
    fitting = _LOGITS_BYTES // (_FLOAT_BYTES * vocabulary)
    return None if fitting >= _MANY_TOKENS else max(_LEAST_TOKENS, fitting)


@dataclass(frozen=True, slots=True)
class ChunkedLoss:
    """The mean loss over the targets of a microbatch.

    Attributes:
        loss_of: The mean loss over the targets of some positions, from (n, 1.., C) and labels (n, 1..). It draws no
            random numbers and changes no buffer.
        labels: (B, P..).
        parameters: With which it computes; leaves.
        num_positions: Of a chunk.
        scale: What a chunk's gradients are computed from, see `StageModule.loss`.
    """

    loss_of: Callable[[Tensor, Tensor], Tensor]
    labels: Tensor
    parameters: Sequence[Tensor]
    num_positions: int
    scale: float = 1.0

    def of(self, received: Tensor) -> Tensor:
        """Return it, a scalar.

        Args:
            received: (B, P.., C).
        """
        if torch.is_grad_enabled():
            # torch's own hint leaves the result open.
            return cast("Tensor", _WithGradients.apply(self, received, *self.parameters))  # pyright: ignore[reportUnknownMemberType]
        total = torch.zeros((), device=received.device)
        for place, labels, share in self._chunks():
            total = total + self.loss_of(self._positions(received)[place], labels) * share
        return total

    def with_gradients(self, received: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and `scale` times its gradients for `received` and for the parameters, whose `.grad` stay as
        they are."""
        total = torch.zeros((), device=received.device)
        gradient = torch.zeros_like(received, memory_format=torch.contiguous_format)
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            for place, labels, share in self._chunks():
                chunk = self._positions(received.detach())[place].requires_grad_()
                with torch.enable_grad():
                    loss = self.loss_of(chunk, labels) * share
                # Adds to the `.grad` of the parameters in place.
                torch.autograd.backward(loss, loss.detach().new_full((), self.scale))
                total = total + loss.detach()
                if chunk.grad is not None:
                    self._positions(gradient)[place] = chunk.grad
            return total, [gradient, *(parameter.grad for parameter in self.parameters)]
        finally:
            for parameter, own in zip(self.parameters, before, strict=True):
                parameter.grad = own

    def _positions(self, tensor: Tensor) -> Tensor:
        """(B, P.., ...) as samples of one position each, (N, 1.., ...)."""
        num_dims = self.labels.dim()
        return tensor.reshape(-1, *[1] * (num_dims - 1), *tensor.shape[num_dims:])

    def _chunks(self) -> Iterator[tuple[slice, Tensor, float]]:
        """Of each chunk that has targets: where it is, its labels, and its share of the targets."""
        labels = self._positions(self.labels)
        starts = range(0, len(labels), self.num_positions)
        places = [slice(start, start + self.num_positions) for start in starts]
        is_target = labels != _IGNORED
        # At once, because a device stops for each number that is read.
        counts = [int(count) for count in torch.stack([is_target[place].sum() for place in places]).cpu()]
        for place, count in zip(places, counts, strict=True):
            if count:
                yield place, labels[place], count / sum(counts)


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are there before its backward."""

    @staticmethod
    def forward(ctx: Any, loss: ChunkedLoss, received: Tensor, *parameters: Tensor) -> Tensor:
        # Neither half of a split backward (`pipeline.split_backward`) has less to do than the whole.
        ctx.is_done_at_once = True
        ctx.loss = loss
        ctx.save_for_backward(received)
        value, ctx.gradients = loss.with_gradients(received)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *scales: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = ctx.loss.with_gradients(*ctx.saved_tensors)
        given = cast("list[Tensor | None]", gradients)
        weight = scales[0] / ctx.loss.scale
        return None, *(None if each is None else each.mul_(weight) for each in given)
