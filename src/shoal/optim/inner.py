"""Inner optimizers: parameters are stepped by SGD, AdamW or Muon, each by the rule and the settings that are its own.

Which rule and which settings a parameter has says `InnerOptimConfig`; what a rule does is in `optim.update_rules`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shoal.config.diloco import InnerOptimConfig, InnerOptimSettings
from shoal.errors import ConfigError
from shoal.optim.update_rules import UpdateRule, rule_of

InnerStates = dict[int, dict[str, Tensor]]
"""By a parameter's number, then by name."""


class _Together(NamedTuple):
    """Parameters that are stepped together, by number, and how."""

    indices: list[int]
    settings: InnerOptimSettings
    weight_decay: float


class InnerOptimizer:
    """One stage's inner optimizer. Gradients are read from `.grad`; the learning rate comes with every step.

    Attributes:
        state: By the parameter's number, from the first gradient on that has changed it.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], config: InnerOptimConfig) -> None:
        """Takes the parameters as they are.

        Raises:
            ConfigError: This version of torch has no such optimizer.
        """
        given = list(named)
        self._params = tuple(parameter for _, parameter in given)
        self._settings = [config.settings_of(group_name(name), parameter.ndim) for name, parameter in given]
        self._rules: list[UpdateRule] = [rule_of(settings.optim.type) for settings in self._settings]
        self._lr = config.lr
        self._together = self._by_settings()
        self.state: InnerStates = {}

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Applies one step; parameters without a gradient stay, and those whose group waits for another step.

        Args:
            lr: The learning rate of parameters in no group. Those of groups keep their ratio to it, and so do those
                that Muon leaves to AdamW.
            number: Of the step, as its trainer counts over the whole run.
        """
        for indices, (optim, every_steps), weight_decay in self._together:
            if number % every_steps:
                continue
            rule = self._rules[indices[0]]
            trained = [index for index in indices if self._params[index].grad is not None]
            for index in trained:
                if index not in self.state:
                    self.state[index] = rule.initial_state(self._params[index], optim)
            params = [self._params[index] for index in trained]
            gradients = [cast(Tensor, parameter.grad) for parameter in params]
            # Where there is no other rate, the very number that the trainer sent.
            own_lr = lr if optim.lr == self._lr else lr * (optim.lr / self._lr)
            rule.apply(params, gradients, [self.state[index] for index in trained], optim, own_lr, weight_decay)

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
        return {
            index: self._rules[index].initial_state(self._params[index], self._settings[index].optim)
            for index in chosen
        }

    def reset(self) -> None:
        """Forgets the state, as if no parameter had ever had a gradient."""
        self.state.clear()

    def _by_settings(self) -> list[_Together]:
        found: dict[tuple[InnerOptimSettings, float], list[int]] = {}
        for index, (parameter, settings) in enumerate(zip(self._params, self._settings, strict=True)):
            key = settings, self._rules[index].weight_decay(parameter, settings.optim)
            found.setdefault(key, []).append(index)
        return [_Together(indices, *key) for key, indices in found.items()]


def build_inner_optimizer(named: Iterable[tuple[str, Tensor]], config: InnerOptimConfig) -> InnerOptimizer:
    """Builds the optimizer that `diloco.inner_optim` asks for.

    Args:
        named: The stage's parameters in the order of its layout, with their names in the stage or in a unit's; may be
            empty.

    Raises:
        ConfigError: As `InnerOptimizer`.
    """
    return InnerOptimizer(named, config)


def group_name(name: str) -> str:
    """The name by which groups know a parameter: from its unit on, and the same where its weight is quantised."""
    return name.removeprefix("units.").replace(".parametrizations.", ".").removesuffix(".original")


def require_matches(config: InnerOptimConfig, names: Iterable[str]) -> None:
    """Check that patterns match a parameter: a misspelt name would change nothing, and nobody would notice.

    Args:
        names: Of all parameters of the model that are trained, from their units on.

    Raises:
        ConfigError: Some groups have none, or `muon_except` has none; the message has a line for each.
    """
    exceptions = config.muon_except if config.type == "muon" else ()
    if not config.groups and not exceptions:
        return  # and no name is looked up
    known = sorted(names)
    problems: list[str] = []
    for position, group in enumerate(config.groups):
        if not any(map(group.matches, known)):
            what = f"groups[{position}] (name_patterns: {list(group.name_patterns)})"
            problems.append(_unmatched(what, group.name_patterns, known))
    if exceptions and not any(config.is_excepted(name) for name in known):
        what = f"muon_except ({list(exceptions)}; [] if muon is to step all matrices)"
        problems.append(_unmatched(what, exceptions, known))
    if problems:
        raise ConfigError("\n".join(problems))


def _unmatched(what: str, patterns: Iterable[str], known: Sequence[str]) -> str:
    near = [near for pattern in patterns for near in difflib.get_close_matches(pattern, known, 3, 0.4)]
    meant = ", ".join(dict.fromkeys(near or known[:3]))
    return f"diloco.inner_optim.{what}: matches no parameter that is trained; they are called like {meant}"
