"""The outer step of DiLoCo on flat buffers: pseudo-gradient, then SGD with Nesterov momentum, staged.

Source: DiLoCo (arXiv 2311.08105, algorithm 1: the outer gradient is the average of outer minus local parameters) and
OpenDiLoCo (arXiv 2407.07852). Shapes: N = elements of the flat buffer (see `optim.flat`), float32 (float64 in tests).

Every product and every sum is an operation of its own. `add(alpha=...)`, `addcmul` and `lerp` may be compiled to a
fused multiply-add, which rounds once where two operations round twice: replicas on different hardware would then end
a round with different bits.

Some elements are only averaged: theta' = theta - g, the mean of the local values, without momentum. Learned step sizes
are small and positive, and an update that goes further than the replicas have gone together can take one below zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.optim.vector_memory import IN_MEMORY, VectorMemory, leave

_PART = 1 << 18


def pseudo_gradient(outer_N: Tensor, local_N: Tensor, *, out: Tensor | None = None) -> Tensor:
    """What a replica contributes to the round: the outer parameters minus its local ones, in `out` or a new vector."""
    return torch.sub(outer_N, local_N, out=out)


@dataclass(frozen=True, slots=True)
class OuterSgd:
    """SGD on averaged pseudo-gradients.

    Attributes:
        momentum: mu.
        nesterov: Whether the update looks ahead by one momentum step.
        averaged: From where on to which element the buffers are only averaged; parts that do not overlap.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    averaged: tuple[slice, ...] = ()

    @torch.no_grad()
    def stage(
        self, outer_N: Tensor, momentum_N: Tensor, average_N: Tensor, memory: VectorMemory = IN_MEMORY
    ) -> tuple[Tensor, Tensor]:
        """Computes one outer step into new buffers; the inputs stay as they are until the round's record swaps.

        Args:
            outer_N: The outer parameters theta of the round before.
            momentum_N: The outer momentum v of the round before, zeros before the first.
            average_N: The averaged pseudo-gradient g.
            memory: Where the new buffers are to lie.

        Returns:
            `(theta - lr * u, v')` with `v' = mu * v + g` and `u = g + mu * v'` (Nesterov) or `u = v'`; where elements
            are only averaged, `(theta - g, 0)`.
        """
        new_outer_N = memory.empty(outer_N.numel(), outer_N.dtype)
        new_momentum_N = memory.empty(momentum_N.numel(), momentum_N.dtype)
        # Part by part, so that beside the two new vectors hardly any memory is taken.
        for start in range(0, outer_N.numel(), _PART):
            part = slice(start, start + _PART)
            velocity, average = new_momentum_N[part], average_N[part]
            torch.mul(momentum_N[part], self.momentum, out=velocity)
            velocity += average
            update = velocity
            if self.nesterov:
                update = velocity * self.momentum
                update += average
            torch.sub(outer_N[part], update * self.lr, out=new_outer_N[part])
            leave(outer_N[part], momentum_N[part], new_outer_N[part], new_momentum_N[part], average)
        for part in self.averaged:
            torch.sub(outer_N[part], average_N[part], out=new_outer_N[part])
            new_momentum_N[part] = 0
        return new_outer_N, new_momentum_N
