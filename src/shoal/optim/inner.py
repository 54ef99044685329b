"""Inner optimizers: parameters are stepped by SGD, AdamW or Muon, each by the rule and the settings that are its own.

Which rule and which settings a parameter has says `InnerOptimConfig`; what a rule does is in `optim.update_rules`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from shoal.config.diloco import InnerOptimConfig, InnerOptimSettings
from shoal.errors import ConfigError
from shoal.optim.update_rules import SteppedTogether, UpdateRule, rule_of
from shoal.optim.vector_memory import IN_MEMORY, VectorMemory, leave

_CONV1D: Final = ("transformers.pytorch_utils", "Conv1D")

InnerStates = dict[int, dict[str, Tensor]]
"""By a parameter's number, then by name."""


class _Together(NamedTuple):
    """Parameters that are stepped together, by number, and how."""

    indices: list[int]
    settings: InnerOptimSettings
    weight_decay: float
    are_transposed: bool


class InnerOptimizer:
    """One stage's inner optimizer. Gradients are read from `.grad`; the learning rate comes with every step.

    Attributes:
        state: By the parameter's number, from the first gradient on that has changed it.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        config: InnerOptimConfig,
        transposed: Collection[str] = (),
        memory: VectorMemory = IN_MEMORY,
    ) -> None:
        """Takes the parameters as they are.

        Args:
            named: The stage's parameters in the order of its layout, with their names in the stage or in a unit's; may
                be empty.
            config: `diloco.inner_optim`.
            transposed: See `transposed_matrices`.
            memory: Where the state lies. Where that is short, one parameter is stepped after the other.

        Raises:
            ConfigError: This version of torch has no such optimizer.
        """
        self._memory = memory
        given = list(named)
        self._params = tuple(parameter for _, parameter in given)
        self._dimensions = [own_dimensions(name, parameter) for name, parameter in given]
        of_each = zip(given, self._dimensions, strict=True)
        self._settings = [config.settings_of(group_name(name), dimensions) for (name, _), dimensions in of_each]
        self._rules: list[UpdateRule] = [rule_of(settings.optim.type) for settings in self._settings]
        self._lr = config.lr
        are_transposed = [group_name(name) in transposed for name, _ in given]
        self._together = self._by_settings(are_transposed)
        self.state: InnerStates = {}

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Applies one step; parameters without a gradient stay, and those whose group waits for another step.

        Args:
            lr: The learning rate of parameters in no group. Those of groups keep their ratio to it, and so do those
                that Muon leaves to AdamW.
            number: Of the step, as its trainer counts over the whole run.
        """
        for indices, (optim, every_steps), weight_decay, are_transposed in self._together:
            if number % every_steps:
                continue
            rule = self._rules[indices[0]]
            trained = [index for index in indices if self._params[index].grad is not None]
            for index in trained:
                if index not in self.state:
                    self.state[index] = rule.initial_state(self._params[index], optim, self._memory)
            params = [self._params[index] for index in trained]
            gradients = [cast(Tensor, parameter.grad) for parameter in params]
            states = [self.state[index] for index in trained]
            if are_transposed:
                # The other way round, in the same memory.
                params, gradients = [each.t() for each in params], [each.t() for each in gradients]
                states = [{name: each.t() for name, each in state.items()} for state in states]
            # Where there is no other rate, the very number that the trainer sent.
            own_lr = lr if optim.lr == self._lr else lr * (optim.lr / self._lr)
            if not self._memory.is_short:
                rule.apply(SteppedTogether(params, gradients, states, own_lr, weight_decay), optim)
                continue
            for parameter, gradient, state in zip(params, gradients, states, strict=True):
                rule.apply(SteppedTogether([parameter], [gradient], [state], own_lr, weight_decay), optim)
                leave(*state.values())

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
            index: self._rules[index].initial_state(self._params[index], self._settings[index].optim, self._memory)
            for index in chosen
        }

    def reset(self) -> None:
        """Forgets the state, as if no parameter had ever had a gradient."""
        self.state.clear()

    def _by_settings(self, are_transposed: Sequence[bool]) -> list[_Together]:
        found: dict[tuple[InnerOptimSettings, float, bool], list[int]] = {}
        for index, (dimensions, settings) in enumerate(zip(self._dimensions, self._settings, strict=True)):
            # All but muon treat each element by itself.
            is_turned = are_transposed[index] and settings.optim.type == "muon"
            key = settings, self._rules[index].weight_decay(dimensions, settings.optim), is_turned
            found.setdefault(key, []).append(index)
        return [_Together(indices, *key) for key, indices in found.items()]


def transposed_matrices(module: nn.Module) -> frozenset[str]:
    """Which weights of a stage have a row for what comes in and a column for what goes out, by `group_name`.

    Those of a GPT-2 of transformers do; all others are (out, in), which is what the shape factor of muon is about.
    """
    owners = cast("Iterable[tuple[str, nn.Module]]", module.named_modules())
    return frozenset(group_name(f"{name}.weight") for name, owner in owners if _is_conv1d(owner))


def _is_conv1d(module: nn.Module) -> bool:
    # One whose weight is quantised is of a class derived from it.
    return any((kind.__module__, kind.__name__) == _CONV1D for kind in type(module).__mro__)


def group_name(name: str) -> str:
    """The name by which groups know a parameter: from its unit on, and the same where its weight is quantised."""
    return name.removeprefix("units.").replace(".parametrizations.", ".").removesuffix(".original")


def own_dimensions(name: str, parameter: Tensor) -> int:
    """How many dimensions a parameter has for itself: one, if it is a bias or a norm's, as many of these as may lie in
    one matrix (a bias of each expert, a norm of each head)."""
    owner, _, own = group_name(name).rpartition(".")
    is_vector = own.endswith("bias") or "norm" in owner.rpartition(".")[2].lower()
    return min(1, parameter.ndim) if is_vector else parameter.ndim


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
