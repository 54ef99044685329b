"""How one step changes parameters: SGD, AdamW and Muon.

SGD and AdamW are torch's `fused` implementation, which goes over the memory once. Its bits differ from those of torch's
other implementations, and the plain loop uses the same. It is torch's functional form that is called: the optimizer
classes import the whole compiler when the first one is made, which costs each process that does a second and 75 MB.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shoal.config.diloco import InnerOptimConfig, InnerOptimType
from shoal.errors import ConfigError
from shoal.optim.vector_memory import IN_MEMORY, VectorMemory

_NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
_EPSILON: Final = 1e-7
"""Both as Muon's author has them, and torch by default."""


class SteppedTogether(NamedTuple):
    """Parameters that have the same settings, with what one step changes them by."""

    params: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Tensor]]
    lr: float
    weight_decay: float

    def state(self, name: str) -> list[Tensor]:
        """One tensor of each parameter's state."""
        return [state[name] for state in self.states]


class UpdateRule(ABC):
    """What an optimizer does with a parameter. It keeps nothing itself."""

    def weight_decay(self, num_dimensions: int, optim: InnerOptimConfig) -> float:
        """The decay of a parameter, times the learning rate.

        Args:
            num_dimensions: See `inner.own_dimensions`.
        """
        return 0.0

    @abstractmethod
    def initial_state(
        self, parameter: Tensor, optim: InnerOptimConfig, memory: VectorMemory = IN_MEMORY
    ) -> dict[str, Tensor]:
        """The state before a parameter's first step, in `memory`."""

    @abstractmethod
    def apply(self, stepped: SteppedTogether, optim: InnerOptimConfig) -> None:
        """Changes parameters and their states in place."""


class AdamW(UpdateRule):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Decay applies to parameters of two and more dimensions only (matrices, kernels, embeddings): shrinking norms, biases
    and learned quantisation steps towards zero regularises nothing.
    """

    def weight_decay(self, num_dimensions: int, optim: InnerOptimConfig) -> float:
        return optim.adam_weight_decay if num_dimensions >= 2 else 0.0

    def initial_state(
        self, parameter: Tensor, optim: InnerOptimConfig, memory: VectorMemory = IN_MEMORY
    ) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": memory.zeros_like(parameter),
            "exp_avg_sq": memory.zeros_like(parameter),
        }

    def apply(self, stepped: SteppedTogether, optim: InnerOptimConfig) -> None:
        adamw(
            stepped.params,
            stepped.gradients,
            stepped.state("exp_avg"),
            stepped.state("exp_avg_sq"),
            [],
            stepped.state("step"),
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=optim.adam_betas1,
            beta2=optim.adam_betas2,
            lr=stepped.lr,
            weight_decay=stepped.weight_decay,
            eps=optim.adam_eps,
            maximize=False,
        )


class Sgd(UpdateRule):
    """SGD with (Nesterov's) momentum, without weight decay."""

    def initial_state(
        self, parameter: Tensor, optim: InnerOptimConfig, memory: VectorMemory = IN_MEMORY
    ) -> dict[str, Tensor]:
        # With zero dampening a velocity of zeros becomes the first gradient, as torch's own first step has it.
        return {"momentum": memory.zeros_like(parameter)} if optim.sgd_momentum else {}

    def apply(self, stepped: SteppedTogether, optim: InnerOptimConfig) -> None:
        sgd(
            stepped.params,
            stepped.gradients,
            [state.get("momentum") for state in stepped.states],
            foreach=False,
            fused=True,
            weight_decay=stepped.weight_decay,
            momentum=optim.sgd_momentum,
            lr=stepped.lr,
            dampening=0.0,
            # Nesterov's form of no momentum is plain sgd.
            nesterov=optim.sgd_nesterov and optim.sgd_momentum > 0,
            maximize=False,
        )


class Muon(UpdateRule):
    """Momentum whose direction is made orthogonal (Muon: kellerjordan.github.io/posts/muon), in torch's implementation.

    Of the momentum of a matrix (A, B), U S V', some Newton-Schulz iterations in bfloat16 make about U V': each
    direction is followed equally far. Weight decay is decoupled, as AdamW's.
    """

    def weight_decay(self, num_dimensions: int, optim: InnerOptimConfig) -> float:
        return optim.muon_weight_decay

    def initial_state(
        self, parameter: Tensor, optim: InnerOptimConfig, memory: VectorMemory = IN_MEMORY
    ) -> dict[str, Tensor]:
        return {"momentum_buffer": memory.zeros_like(parameter)}

    def apply(self, stepped: SteppedTogether, optim: InnerOptimConfig) -> None:
        # The newest of the three: the oldest torch that is supported has none, and its users need none.
        from torch.optim._muon import muon

        muon(
            stepped.params,
            stepped.gradients,
            stepped.state("momentum_buffer"),
            foreach=False,
            lr=stepped.lr,
            weight_decay=stepped.weight_decay,
            momentum=optim.muon_momentum,
            nesterov=optim.muon_nesterov,
            ns_coefficients=_NEWTON_SCHULZ,
            eps=_EPSILON,
            ns_steps=optim.muon_ns_steps,
            adjust_lr_fn=optim.muon_adjust_lr,
            has_complex=False,
        )


@cache
def rule_of(type: InnerOptimType) -> UpdateRule:
    """The rule of a type of optimizer.

    Raises:
        ConfigError: This version of torch has none.
    """
    if type == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"diloco.inner_optim.type = muon: torch {torch.__version__} has no Muon; install torch 2.9 or newer"
        )
    return {"adam": AdamW, "sgd": Sgd, "muon": Muon}[type]()
