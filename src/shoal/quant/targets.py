"""What of a module can be quantised: which of its parameters, along which of their dimensions, and whether its input.

    Linear, Conv2d        weight (out, ...)                           its input
    Conv1D                weight (in, out), a GPT-2's of transformers  its input
    Embedding             weight (rows, C), only where a rule says so -
    experts               gate_up_proj (E, ..), down_proj (E, ..)     their common input

Experts are one module with a matrix of each: those of transformers. All other modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor, nn

from shoal.config.quant import QuantConfig
from shoal.quant.rules import ModulePlan, plan_module

QUANTISABLE = "Linear, Conv1D, Conv2d, Embedding and experts in one module"
"""For messages."""


class Channels(NamedTuple):
    """Which parts of a weight may have step sizes of their own.

    Attributes:
        dims: The dimensions that count output channels, and what those are in.
        matrices: Of these the ones that count matrices, each of which has a step size at least.
    """

    dims: tuple[int, ...] = (0,)
    matrices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """What of a module can be quantised.

    Attributes:
        weights: Parameters of its own, by name.
        has_input: Whether its input can be.
        in_base: Whether it is without a rule that says so.
    """

    weights: Mapping[str, Channels]
    has_input: bool = True
    in_base: bool = True

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The module's parameters that can be quantised, before they are."""
        return [module.get_parameter(name) for name in self.weights]


def target_of(module: nn.Module) -> Target | None:
    """What of a module can be quantised; None: nothing. Values do not matter, so it may be on the meta device."""
    if isinstance(module, nn.Embedding):
        return Target({"weight": Channels()}, has_input=False, in_base=False)
    if isinstance(module, nn.Linear | nn.Conv2d):
        return Target({"weight": Channels()})
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return Target({"weight": Channels((1,))})
    return _experts(module)


def plan_of(quant: QuantConfig, path: str, module: nn.Module, stage: int) -> ModulePlan:
    """What the configuration says about a module and can be done with it; see `rules.plan_module`."""
    target = target_of(module)
    if target is None:
        return ModulePlan(None, None)
    plan = plan_module(quant, path, type(module).__name__, stage, in_base=target.in_base)
    return plan if target.has_input else ModulePlan(plan.weight, None)


def module_path(unit_name: str, name: str) -> str:
    """The path by which rules name a module: that of its unit, and its own within the unit, empty for the unit."""
    return f"{unit_name}.{name}" if name else unit_name


def _experts(module: nn.Module) -> Target | None:
    """Experts of width I between layers of width C: (E, 2I, C) and (E, C, I), or each matrix the other way round."""
    own = cast("dict[str, Tensor | None]", module._parameters)  # pyright: ignore[reportPrivateUsage]
    up, down = own.get("gate_up_proj"), own.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        return None
    (_, up_rows, up_columns), (_, down_rows, down_columns) = up.shape, down.shape
    if (up_rows, up_columns) == (2 * down_columns, down_rows):
        channels = Channels((0, 1), (0,))
    elif (up_rows, up_columns) == (down_columns, 2 * down_rows):
        channels = Channels((0, 2), (0,))
    else:
        return None
    return Target({"gate_up_proj": channels, "down_proj": channels})
