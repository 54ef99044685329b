"""Where a causal language model of transformers is cut, and a part of it that computes over some of its layers.

    model                          unit
    +-- base model
    |   +-- embeddings, dropout    embedding     what comes before the list of layers
    |   +-- list of layers         block_0 ...   the longest list there is: one entry for each of num_hidden_layers
    |   +-- norm                   head          what comes after the list, with parameters or without,
    +-- output embeddings          head          and what the model has beside its base model
        rotary and the like        every part    what has buffers and no parameters: constants

A part runs the model's own forward, so masks, positions and rotary embeddings are made once in it: its list holds its
own layers, each list in its config that says something of every layer is cut alike, and what belongs to another part
does nothing. Whether that is exact for a model is not assumed but proven (`twin`).

Shapes: B samples, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.model.hf.library import build_without_memory, give_values
from shoal.model.hf.routers import router_losses
from shoal.model.router_loss import RouterLosses


class Skeleton:
    """A whole model without memory, taken apart. Its modules are copied, never used.

    Args:
        config: Of the model; stays as it is.

    Raises:
        ConfigError: It is no causal language model that can be built, or it is not made like one that can be cut.
    """

    def __init__(self, config: Any) -> None:
        self.model = build_without_memory(config)
        self.num_layers: int = config.num_hidden_layers
        base: nn.Module = self.model.base_model
        self._list = self._list_of_layers(base)
        owner = _owner(base, self._list)
        self.layers = list(cast("nn.ModuleList", base.get_submodule(self._list)))
        self._place = next(name for name, module in self.model.named_modules() if module is owner)
        names = [name for name, _ in owner.named_children()]
        at = names.index(self._list.rpartition(".")[2])
        self._before = {n: owner.get_submodule(n) for n in names[:at] if not _is_constant(owner.get_submodule(n))}
        self._after = {n: owner.get_submodule(n) for n in names[at + 1 :] if not _is_constant(owner.get_submodule(n))}
        self._beside = {n: m for n, m in self.model.named_children() if m is not base and _has_parameters(m)}
        self._require_complete()
        setattr(owner, names[at], nn.ModuleList())

    @property
    def is_tied(self) -> bool:
        """Whether the input embeddings and the output embeddings are the same parameter."""
        return bool(self.model.all_tied_weights_keys)

    @property
    def embedding_names(self) -> tuple[str, str]:
        """The names in the whole model of the input embeddings' parameter and the output embeddings'."""
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        modules = cast("Iterator[tuple[str, nn.Module]]", self.model.named_modules())
        found = {id(module): name for name, module in modules}
        before, after = (f"{found[id(module)]}.weight" for module in ends)
        return before, after

    def unit(self, index: int) -> nn.Module:
        """Return a copy of the modules of a unit, with initial values, or on the meta device without.

        Raises:
            ConfigError: The model's own rules leave a tensor without one.
        """
        if not 0 < index <= self.num_layers:
            ends = nn.ModuleDict(copy.deepcopy(self._before if index == 0 else {**self._after, **self._beside}))
            give_values(self.model, ends)
            return ends
        layer = copy.deepcopy(self.layers[index - 1])
        base = copy.deepcopy(_owner(self.model.base_model, self._list))
        setattr(base, self._list.rpartition(".")[2], nn.ModuleList([layer]))
        give_values(self.model, layer, around=base)
        return layer

    def part(self, indices: range, units: nn.ModuleDict) -> Part:
        """Return what computes over units: theirs are the modules that it runs."""
        modules = dict(zip(indices, units.values(), strict=True))
        first, last = modules.get(0), modules.get(self.num_layers + 1)
        # No second copy of what the units are.
        model = copy.deepcopy(self.model)
        owner = _owner(model.base_model, self._list)
        mine = [index - 1 for index in indices if 0 < index <= self.num_layers]
        setattr(owner, self._list.rpartition(".")[2], nn.ModuleList([modules[layer + 1] for layer in mine]))
        owner.config = _sliced(owner.config, mine, self.num_layers)
        for name, module in self._before.items():
            setattr(owner, name, _child(first, name) or self._absent(module))
        for name in self._after:
            setattr(owner, name, _child(last, name) or nn.Identity())
        for name in self._beside:
            setattr(model, name, _child(last, name) or nn.Identity())
        constants = nn.ModuleDict({name: module for name, module in owner.named_children() if _is_constant(module)})
        for module in constants.values():
            give_values(self.model, module)
        routers = router_losses(model, (modules[layer + 1] for layer in mine))
        return Part(model, constants, routers, is_first=first is not None, is_last=last is not None)

    def tie(self, first: nn.Module, last: nn.Module) -> None:
        """Make the output embeddings' parameter in the last unit the input embeddings' in the first one."""
        (at_first, at_last) = self.embedding_names
        input_name = self.whole_names(0, first.state_dict())[at_first]
        output_name = self.whole_names(self.num_layers + 1, last.state_dict())[at_last]
        output = last.get_submodule(output_name.rpartition(".")[0])
        output.register_parameter("weight", first.get_parameter(input_name))

    def whole_names(self, index: int, inner: Iterable[str]) -> dict[str, str]:
        """Return the names in the whole model of what has these names in a unit, and the latter."""
        if 0 < index <= self.num_layers:
            return {f"{self._of_layer(index)}.{name}": name for name in inner}
        beside = {name for name in inner if name.partition(".")[0] in self._beside}
        return {name if name in beside else _joined(self._place, name): name for name in inner}

    def unit_of_each(self) -> dict[str, int]:
        """Return the unit of each tensor of the whole model, by its name there."""
        ends = nn.ModuleDict(self._before), nn.ModuleDict({**self._after, **self._beside})
        units = enumerate([ends[0], *self.layers, ends[1]])
        return {whole: index for index, unit in units for whole in self.whole_names(index, unit.state_dict())}

    def around(self, index: int, unit: nn.Module) -> Any:
        """Return a whole model without memory that has a unit's modules at their place."""
        model = copy.deepcopy(self.model)
        owner = model.get_submodule(self._place)
        layers = [nn.Module() for _ in range(self.num_layers)]
        if 0 < index <= self.num_layers:
            layers[index - 1] = unit
        else:
            for name, module in unit.named_children():
                setattr(model if name in self._beside else owner, name, module)
        setattr(owner, self._list.rpartition(".")[2], nn.ModuleList(layers))
        return model

    def _of_layer(self, index: int) -> str:
        return f"{_joined(self._place, self._list.rpartition('.')[2])}.{index - 1}"

    def _absent(self, module: nn.Module) -> nn.Module:
        """What stands for a module before the layers in a part that has others' output before its layers."""
        is_positions = isinstance(module, nn.Embedding) and module is not self.model.get_input_embeddings()
        return _NoPositions() if is_positions else nn.Identity()

    def _list_of_layers(self, base: nn.Module) -> str:
        for name, module in cast("Iterator[tuple[str, nn.Module]]", base.named_modules()):
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return name
        raise ConfigError(
            f"{type(self.model).__name__} of transformers has no list of its {self.num_layers} layers, so it cannot be "
            "cut; a model of text alone may have one"
        )

    def _require_complete(self) -> None:
        """Every parameter is of a unit, and the first one has the embeddings."""
        units = [*self._before.values(), *self.layers, *self._after.values(), *self._beside.values()]
        known = {id(parameter) for unit in units for parameter in unit.parameters()}
        left = [name for name, p in self.model.named_parameters() if id(p) not in known]
        shared = self._after.keys() & self._beside.keys()
        embeddings = self.model.get_input_embeddings()
        if left or shared or embeddings not in self._before.values() or self.model.get_output_embeddings() is None:
            odd = ", ".join([*left[:5], *shared]) or "its embeddings"
            raise ConfigError(
                f"{type(self.model).__name__} of transformers is not made of embeddings, layers, a norm and a head, so "
                f"it cannot be cut: look at {odd}"
            )


class Part(nn.Module):
    """The model's own forward over some layers: tokens (B, T) or hidden (B, T, C) to hidden or logits (B, T, V).

    The model is not registered: its parameters are the units'. What is, are constants, which keep their type: rotary
    frequencies are float32 whatever a stage computes in.
    """

    def __init__(
        self, model: Any, constants: nn.ModuleDict, routers: RouterLosses | None, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.constants = constants
        self.routers = routers
        # In a tuple, where torch does not look.
        self._model = (model,)
        self._key = "input_ids" if is_first else "inputs_embeds"
        self._is_last = is_last

    @property
    def model(self) -> Any:
        """The model, whose modules are those of the units."""
        return self._model[0]

    def forward(self, x: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Computes.

        Args:
            positions_BT: Of the tokens in their texts, of which a sample may have several: each begins at 0, and no
                token sees another text's. None: a sample is one text.
        """
        model = self.model
        options: dict[str, Any] = {self._key: x, "use_cache": False}
        if positions_BT is not None:
            options["position_ids"] = positions_BT
        if self._is_last:
            return model(**options).logits
        return model.base_model(**options).last_hidden_state

    def train(self, mode: bool = True) -> Self:
        """As every module, and the model's own modules with it."""
        self.model.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.constants.to(fn(torch.empty(0)).device)
        return self


class _NoPositions(nn.Module):
    """Stands for learned positions, which the first part has added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(())


def _owner(base: nn.Module, name: str) -> Any:
    """The module that has the list of layers."""
    return base.get_submodule(name.rpartition(".")[0])


def _joined(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _child(unit: nn.Module | None, name: str) -> nn.Module | None:
    return None if unit is None else cast("nn.ModuleDict", unit)[name]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_constant(module: nn.Module) -> bool:
    return not _has_parameters(module) and next(module.buffers(), None) is not None


def _sliced(config: Any, layers: list[int], num_layers: int) -> Any:
    """Return the config of a model of these layers alone."""
    part = copy.copy(config)
    for name, value in cast("dict[str, Any]", vars(config)).items():
        if isinstance(value, list) and len(cast("list[Any]", value)) == num_layers:
            setattr(part, name, [value[layer] for layer in layers])
    part.num_hidden_layers = len(layers)
    return part
