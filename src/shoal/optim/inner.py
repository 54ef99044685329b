"""Inner optimizers: SGD and AdamW in torch's `fused` implementation, which goes over the memory once.

Its bits differ from those of torch's other implementations, and the plain loop uses the same. It is torch's functional
form that is called: the optimizer classes import the whole compiler when the first one is made, which costs each
process that does a second and 75 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shoal.config.training import InnerOptimConfig

_EPS = 1e-8


InnerStates = dict[int, dict[str, Tensor]]
"""By a parameter's number, then by name."""


class InnerOptimizer(ABC):
    """One stage's inner optimizer. Gradients are read from `.grad`; the learning rate comes with every step.

    Attributes:
        state: By the parameter's number, from its first gradient on.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = tuple(params)
        self.state: InnerStates = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Applies one step with learning rate `lr`; parameters without a gradient stay."""
        trained = [index for index, parameter in enumerate(self._params) if parameter.grad is not None]
        for index in trained:
            if index not in self.state:
                self.state[index] = self._initial_state(self._params[index])
        for indices, weight_decay in self._groups(trained):
            params = [self._params[index] for index in indices]
            gradients = [cast(Tensor, parameter.grad) for parameter in params]
            self._apply(params, gradients, [self.state[index] for index in indices], lr, weight_decay)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state once every parameter has had a gradient."""
        return sum(tensor.nbytes for p in self._params for tensor in self._initial_state(p).values())

    @property
    def has_state(self) -> tuple[bool, ...]:
        """Of each parameter whether it has had a gradient."""
        return tuple(index in self.state for index in range(len(self._params)))

    @property
    def state_tensors(self) -> list[Tensor]:
        """The state (not copies) in the order of the parameters, and of the names of each one's."""
        return [state[name] for _, state in sorted(self.state.items()) for name in sorted(state)]

    def begun(self, has_state: Sequence[bool]) -> InnerStates:
        """A state for these parameters, as it is before their first step."""
        chosen = [index for index, has in enumerate(has_state) if has]
        return {index: self._initial_state(self._params[index]) for index in chosen}

    def reset(self) -> None:
        """Forgets the state, as if no parameter had ever had a gradient."""
        self.state.clear()

    def _groups(self, indices: Sequence[int]) -> list[tuple[list[int], float]]:
        """Parameters that are stepped together, with their weight decay."""
        return [(list(indices), 0.0)]

    @abstractmethod
    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state before a parameter's first step."""

    @abstractmethod
    def _apply(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        """Changes parameters and states in place."""


class AdamW(InnerOptimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Decay applies to parameters of two and more dimensions only (matrices, kernels, embeddings): shrinking norms, biases
    and learned quantisation steps towards zero regularises nothing.
    """

    def __init__(self, params: Sequence[Tensor], *, beta1: float, beta2: float, weight_decay: float) -> None:
        super().__init__(params)
        self._beta1, self._beta2, self._weight_decay = beta1, beta2, weight_decay

    def _groups(self, indices: Sequence[int]) -> list[tuple[list[int], float]]:
        matrices = [index for index in indices if self._params[index].ndim >= 2]
        others = [index for index in indices if self._params[index].ndim < 2]
        return [(matrices, self._weight_decay), (others, 0.0)]

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def _apply(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        adamw(
            params,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=_EPS,
            maximize=False,
        )


class Sgd(InnerOptimizer):
    """SGD with (Nesterov's) momentum, without weight decay."""

    def __init__(self, params: Sequence[Tensor], *, momentum: float, nesterov: bool) -> None:
        super().__init__(params)
        self._momentum = momentum
        # Nesterov's form of no momentum is plain sgd.
        self._nesterov = nesterov and momentum > 0

    def _initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        # With zero dampening a velocity of zeros becomes the first gradient, as torch's own first step has it.
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if self._momentum else {}

    def _apply(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        lr: float,
        weight_decay: float,
    ) -> None:
        sgd(
            params,
            gradients,
            [state.get("momentum") for state in states],
            foreach=False,
            fused=True,
            weight_decay=weight_decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
        )


def build_inner_optimizer(params: Sequence[Tensor], config: InnerOptimConfig) -> InnerOptimizer:
    """Builds the optimizer that `diloco.inner_optim` asks for.

    Args:
        params: The stage's parameters in the order of its layout; may be empty.
    """
    if config.type == "sgd":
        return Sgd(params, momentum=config.sgd_momentum, nesterov=config.sgd_nesterov)
    return AdamW(params, beta1=config.adam_betas1, beta2=config.adam_betas2, weight_decay=config.adam_weight_decay)
