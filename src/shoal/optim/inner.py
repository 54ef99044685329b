"""Inner optimizers: SGD and AdamW as torch has them, in the one implementation that gives equal bits everywhere.

`foreach` and `fused` variants round differently from the plain loop and from device to device, so both are off.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.config.training import InnerOptimConfig


class InnerOptimizer:
    """One stage's inner optimizer. Gradients are read from `.grad`; the learning rate comes with every step.

    Weight decay applies to parameters of two and more dimensions only (matrices, kernels, embeddings): shrinking
    norms, biases and learned quantisation steps towards zero regularises nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, lr: float) -> None:
        """Applies one step with learning rate `lr`; parameters without a gradient stay."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as torch lays it out: tensors (not copies) and plain numbers."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a copy of a state that `state_dict` of an optimizer over the same parameters gave."""
        # torch itself would go on with the very tensors of `state` where dtype and device fit.
        self._optimizer.load_state_dict(copy.deepcopy(state))


def build_inner_optimizer(params: Sequence[Tensor], config: InnerOptimConfig) -> InnerOptimizer:
    """Builds the optimizer that `diloco.inner_optim` asks for.

    Args:
        params: The stage's parameters in the order of its layout; may be empty.
        config: `type` is `adam` (decoupled weight decay, that is AdamW, arXiv 1711.05101) or `sgd` (none).
    """
    decay = config.adam_weight_decay if config.type == "adam" else 0.0
    # torch refuses an optimizer without parameters, but takes an empty group.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    if config.type == "sgd":
        # torch refuses Nesterov's form of no momentum, which is plain sgd.
        nesterov = config.sgd_nesterov and config.sgd_momentum > 0
        return InnerOptimizer(
            torch.optim.SGD(
                groups, lr=config.lr, momentum=config.sgd_momentum, nesterov=nesterov, foreach=False, fused=False
            )
        )
    betas = (config.adam_betas1, config.adam_betas2)
    return InnerOptimizer(torch.optim.AdamW(groups, lr=config.lr, betas=betas, foreach=False, fused=False))
