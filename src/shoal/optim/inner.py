"""Inner optimizers: SGD and AdamW in torch's `fused` implementation, which goes over the memory once.

Its bits differ from those of torch's other implementations, and the plain loop uses the same. It is torch's functional
form that is called: the optimizer classes import the whole compiler when the first one is made, which costs each
process that does a second and 75 MB.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shoal.config.training import InnerOptimConfig, InnerOptimSettings
from shoal.errors import ConfigError

InnerStates = dict[int, dict[str, Tensor]]
"""By a parameter's number, then by name."""


class _Together(NamedTuple):
    """Parameters that are stepped together, by number, and how."""

    indices: list[int]
    settings: InnerOptimSettings
    weight_decay: float


class InnerOptimizer(ABC):
    """One stage's inner optimizer. Gradients are read from `.grad`; the learning rate comes with every step.

    Attributes:
        state: By the parameter's number, from the first gradient on that has changed it.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], config: InnerOptimConfig) -> None:
        given = list(named)
        self._params = tuple(parameter for _, parameter in given)
        self._settings = [config.settings_of(group_name(name)) for name, _ in given]
        self._lr = config.lr
        self._together = self._by_settings()
        self.state: InnerStates = {}

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Applies one step; parameters without a gradient stay, and those whose group waits for another step.

        Args:
            lr: The learning rate of parameters in no group. Those of groups keep their ratio to it.
            number: Of the step, as its trainer counts over the whole run.
        """
        for indices, (optim, every_steps), weight_decay in self._together:
            if number % every_steps:
                continue
            trained = [index for index in indices if self._params[index].grad is not None]
            for index in trained:
                if index not in self.state:
                    self.state[index] = self._initial_state(self._params[index], optim)
            params = [self._params[index] for index in trained]
            gradients = [cast(Tensor, parameter.grad) for parameter in params]
            # Where there is no other rate, the very number that the trainer sent.
            own_lr = lr if optim.lr == self._lr else lr * (optim.lr / self._lr)
            self._apply(params, gradients, [self.state[index] for index in trained], optim, own_lr, weight_decay)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state once every parameter has had a gradient."""
        states = self.begun([True] * len(self._params)).values()
        return sum(tensor.nbytes for state in states for tensor in state.values())

    @property
    def has_state(self) -> tuple[bool, ...]:
        """Of each parameter whether a gradient has changed it."""
        return tuple(index in self.state for index in range(len(self._params)))

    @property
    def state_tensors(self) -> list[Tensor]:
        """The state (not copies) in the order of the parameters, and of the names of each one's."""
        return [state[name] for _, state in sorted(self.state.items()) for name in sorted(state)]

    def begun(self, has_state: Sequence[bool]) -> InnerStates:
        """A state for these parameters, as it is before their first step."""
        chosen = [index for index, has in enumerate(has_state) if has]
        return {index: self._initial_state(self._params[index], self._settings[index].optim) for index in chosen}

    def reset(self) -> None:
        """Forgets the state, as if no parameter had ever had a gradient."""
        self.state.clear()

    def _by_settings(self) -> list[_Together]:
        found: dict[tuple[InnerOptimSettings, float], list[int]] = {}
        for index, (parameter, settings) in enumerate(zip(self._params, self._settings, strict=True)):
            key = settings, self._weight_decay(parameter, settings.optim)
            found.setdefault(key, []).append(index)
        return [_Together(indices, *key) for key, indices in found.items()]

    def _weight_decay(self, parameter: Tensor, optim: InnerOptimConfig) -> float:
        return 0.0

    @abstractmethod
    def _initial_state(self, parameter: Tensor, optim: InnerOptimConfig) -> dict[str, Tensor]:
        """The state before a parameter's first step."""

    @abstractmethod
    def _apply(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        optim: InnerOptimConfig,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Changes parameters and states in place."""


class AdamW(InnerOptimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Decay applies to parameters of two and more dimensions only (matrices, kernels, embeddings): shrinking norms, biases
    and learned quantisation steps towards zero regularises nothing.
    """

    def _weight_decay(self, parameter: Tensor, optim: InnerOptimConfig) -> float:
        return optim.adam_weight_decay if parameter.ndim >= 2 else 0.0

    def _initial_state(self, parameter: Tensor, optim: InnerOptimConfig) -> dict[str, Tensor]:
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
        optim: InnerOptimConfig,
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
            beta1=optim.adam_betas1,
            beta2=optim.adam_betas2,
            lr=lr,
            weight_decay=weight_decay,
            eps=optim.adam_eps,
            maximize=False,
        )


class Sgd(InnerOptimizer):
    """SGD with (Nesterov's) momentum, without weight decay."""

    def _initial_state(self, parameter: Tensor, optim: InnerOptimConfig) -> dict[str, Tensor]:
        # With zero dampening a velocity of zeros becomes the first gradient, as torch's own first step has it.
        return {"momentum": torch.zeros_like(parameter, requires_grad=False)} if optim.sgd_momentum else {}

    def _apply(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
        optim: InnerOptimConfig,
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
            momentum=optim.sgd_momentum,
            lr=lr,
            dampening=0.0,
            # Nesterov's form of no momentum is plain sgd.
            nesterov=optim.sgd_nesterov and optim.sgd_momentum > 0,
            maximize=False,
        )


def build_inner_optimizer(named: Iterable[tuple[str, Tensor]], config: InnerOptimConfig) -> InnerOptimizer:
    """Builds the optimizer that `diloco.inner_optim` asks for.

    Args:
        named: The stage's parameters in the order of its layout, with their names in the stage or in a unit's; may be
            empty.
    """
    return (Sgd if config.type == "sgd" else AdamW)(named, config)


def group_name(name: str) -> str:
    """The name by which groups know a parameter: from its unit on, and the same where its weight is quantised."""
    return name.removeprefix("units.").replace(".parametrizations.", ".").removesuffix(".original")


def require_groups(config: InnerOptimConfig, names: Iterable[str]) -> None:
    """Check that each group has a parameter: a misspelt name would change nothing, and nobody would notice.

    Args:
        names: Of all parameters of the model that are trained, from their units on.

    Raises:
        ConfigError: Some groups have none; the message has a line for each.
    """
    if not config.groups:
        return  # and no name is looked up
    known = sorted(names)
    problems: list[str] = []
    for position, group in enumerate(config.groups):
        if any(map(group.matches, known)):
            continue
        near = [near for pattern in group.name_patterns for near in difflib.get_close_matches(pattern, known, 3, 0.4)]
        problems.append(
            f"diloco.inner_optim.groups[{position}] (name_patterns: {list(group.name_patterns)}): matches no parameter "
            f"that is trained; they are called like {', '.join(dict.fromkeys(near or known[:3]))}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
