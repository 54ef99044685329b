"""What a unit's tensors are called in a folder of transformers, and how they stand there: by transformers' own rules.

files of save_pretrained --keys of a unit--> renamed, put together (experts) --> the unit's parameters
                         <--renamed, taken apart------------------------------- the unit's parameters

Which code does that is private to transformers in name. The tests of every kind of model compare it with
`save_pretrained` and `from_pretrained` themselves.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.errors import StateMismatch
from shoal.model.hf.skeleton import Skeleton
from shoal.model.valueless import WithoutValues


class Tensors(Protocol):
    """The tensors in files, by their keys."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Its shape."""
        ...

    def read(self, key: str) -> Tensor:
        """Read a tensor, in memory of its own."""
        ...

    def read_into(self, key: str, out: Tensor) -> None:
        """Read a tensor, piece by piece, into one of its shape."""
        ...


class StoredUnits:
    """The units of one model, as files name them.

    Args:
        parts: Where files have no output embeddings, those of a model that is not tied begin as the input embeddings.
    """

    def __init__(self, skeleton: Skeleton, *, parts: bool) -> None:
        self._skeleton = skeleton
        self._begins_alike = parts or skeleton.is_tied
        self._loading = importlib.import_module("transformers.core_model_loading")
        self._whole_names = skeleton.unit_of_each()
        self._input, self._output = skeleton.embedding_names

    @cached_property
    def _conversions(self) -> list[Any]:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        return mapping.get_model_conversion_mapping(self._skeleton.model)

    @cached_property
    def _renaming(self) -> tuple[list[Any], list[Any]]:
        """The conversions that give another name, and those that put tensors together."""
        kinds = self._loading.WeightRenaming, self._loading.WeightConverter
        renamings, converters = ([each for each in self._conversions if isinstance(each, kind)] for kind in kinds)
        return renamings, converters

    def keys_of(self, keys: Iterable[str]) -> list[list[str]]:
        """Return which keys of the files each unit is made of, by the unit's number.

        Raises:
            StateMismatch: One is of no unit.
        """
        found: list[list[str]] = [[] for _ in range(self._skeleton.num_layers + 2)]
        strange: list[str] = []
        for key in keys:
            index = self._whole_names.get(self._renamed(key), self._whole_names.get(key))
            if index is not None:
                found[index].append(key)
            elif not self._is_ignored(key):
                strange.append(key)
        if strange:
            raise StateMismatch(f"these tensors are of no part of the model: {', '.join(sorted(strange)[:5])}")
        has_head = any(self._renamed(key) == self._output for key in found[-1])
        if self._skeleton.is_tied or (self._begins_alike and not has_head):
            # Tied embeddings stand in the files once.
            found[-1] += [key for key in found[0] if self._renamed(key) == self._input]
        return found

    def load(self, index: int, unit: nn.Module, keys: Iterable[str], tensors: Tensors) -> None:
        """Give a unit's parameters and buffers the values in the files.

        What a file has as the unit has it goes there directly: beside the unit a large tensor takes no memory.

        Args:
            unit: Of `Skeleton.unit`, with memory; changed in place.
            keys: Of `keys_of`.

        Raises:
            StateMismatch: They are not those of such a unit.
        """
        own: dict[str, Tensor] = dict(unit.state_dict(keep_vars=True))
        names = self._skeleton.whole_names(index, own)
        plain, others, tied = self._told_apart(keys, names)
        problems: list[str] = []
        for whole, key in plain.items():
            values = own[names[whole]]
            if tensors.shape(key) == tuple(values.shape):
                tensors.read_into(key, values)
            else:
                problems.append(f"{key} of shape {tensors.shape(key)}")
        if tied is not None and plain.get(self._output, tied) != tied:
            values = own[names[self._output]]
            if not torch.equal(values, tensors.read(tied).to(values.dtype)):
                raise StateMismatch(f"{self._output} is tied to {self._input}, and the files have other values of it")
        missing = names.keys() - plain.keys()
        if others:
            loaded, found = self._put_together(index, {key: tensors.read(key) for key in others})
            problems += found
            with torch.no_grad():
                for whole in missing & loaded.keys():
                    own[names[whole]].copy_(loaded[whole])
            missing -= loaded.keys()
        if problems := [*sorted(missing), *problems]:
            named = ", ".join(problems[:5])
            raise StateMismatch(f"these tensors are not there, or not as the model has them: {named}")

    def _told_apart(
        self, keys: Iterable[str], names: Mapping[str, str]
    ) -> tuple[dict[str, str], list[str], str | None]:
        """Return the keys of what the unit has as the files have it, by its name in the model; the other keys; and that
        of input embeddings which a head shares."""
        plain: dict[str, str] = {}
        others: list[str] = []
        tied: str | None = None
        for key in keys:
            whole, converter = self._rename(key)
            whole = whole if whole in self._whole_names else key
            if converter is None and whole in names:
                plain[whole] = key
            elif converter is not None or whole != self._input:
                others.append(key)
            else:
                tied = key
        if tied is not None:
            plain.setdefault(self._output, tied)
        return plain, others, tied if self._skeleton.is_tied else None

    def _put_together(self, index: int, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """What transformers makes of tensors for a unit, by the names in the whole model, and what does not fit."""
        with torch.device("meta"), WithoutValues():
            host = self._skeleton.around(index, self._skeleton.unit(index))
        settings = importlib.import_module("transformers.modeling_utils").LoadStateDictConfig(
            weight_mapping=self._conversions, dtype=torch.float32
        )
        info = self._convert(host, tensors, settings)
        loaded = {name: values for name, values in host.state_dict().items() if not values.is_meta}
        return loaded, [*info.unexpected_keys, *info.conversion_errors, *map(str, info.mismatched_keys)]

    def stored(self, index: int, unit_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a unit's tensors as files have them, by their names there.

        Args:
            unit_state: By the names in the unit.
        """
        state = {whole: unit_state[inner] for whole, inner in self._skeleton.whole_names(index, unit_state).items()}
        return self._loading.revert_weight_conversion(self._skeleton.model, state)

    def _convert(self, host: Any, tensors: dict[str, Tensor], settings: Any) -> Any:
        convert = self._loading.convert_and_load_state_dict_in_model
        # Earlier versions want to be told that nothing is sharded.
        more = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}
        info, _ = convert(host, tensors, settings, **more)
        return info

    def _renamed(self, key: str) -> str:
        """The name that a key of a file has in the model; of what is put together, that of the first part."""
        return self._rename(key)[0]

    def _rename(self, key: str) -> tuple[str, str | None]:
        """The same, with what the conversion is found by that puts it together with others."""
        prefix = self._skeleton.model.base_model_prefix
        return self._loading.rename_source_key(key, *self._renaming, prefix, self._whole_names)

    def _is_ignored(self, key: str) -> bool:
        """Whether it is a constant that earlier versions of transformers have saved."""
        patterns = [*(self._skeleton.model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        return any(re.search(pattern, key) for pattern in patterns)
