"""The family hf as folders of transformers, and back: unit by unit, by transformers' own rules (`model.hf.stored`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from shoal.checkpoint.byte_tokenizer import own_tokenizer, tokens_are_bytes
from shoal.checkpoint.hf_stored import StoredModel, hf_family
from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.model_source import ModelSource
from shoal.config.load import describing_model
from shoal.config.named_code import family_problem
from shoal.config.schema import Config
from shoal.errors import ConfigError
from shoal.model.hf.described import FAMILY, of_the_model
from shoal.model.hf.repository import Repository
from shoal.model.meta import build_without_values
from shoal.model.stage import StageModule
from shoal.optim.flat import FlatEntry

NAMING: Final = "load_model(..., family='{name}'), or --family {name}"
"""How a person names the family of a model in a folder, if that is code of somebody's own."""
_CONTEXT: Final = 1024
"""Tokens of a sample for a model from elsewhere, if it has as many positions."""


class HfForm:
    """How a model of the family hf is written for transformers.

    Args:
        ends: What begins and ends a text, in place of what the model's own config says.

    Attributes:
        entries: Of all tensors in the file.
        described: The content of config.json.
    """

    def __init__(self, config: Config, ends: Mapping[str, int | None]) -> None:
        self._family = hf_family(config)
        self.described: dict[str, Any] | None = {**self._family.file_config, **ends}
        self.entries: list[FlatEntry] = []
        for index in range(self._family.num_units):
            unit = build_without_values(self._family, index, config.run.seed)
            for name, tensor in self._family.stored_state(index, unit).items():
                self.entries.append(FlatEntry(name, tuple(tensor.shape), tensor.dtype, 0))

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a stage as the file has them."""
        for name, unit in stage.units.items():
            for stored, values in self._family.stored_state(self._family.unit_numbers[name], unit).items():
                yield stored, values.detach().contiguous()


def open_hf(
    folder: Path, described: Mapping[str, Any], configuration: Mapping[str, Any] | None, named: str | None
) -> ModelSource:
    """Open a folder of transformers as a model of the family hf.

    Args:
        described: Its `config.json`.
        configuration: Of the run that it was exported from; None: of a model from elsewhere, which is cut into one
            stage for each unit, so that reading it takes no more memory than a unit.
        named: The family of somebody's own that the caller has named; the configuration's is imported if it is that.

    Raises:
        ConfigError: It is no causal language model that can be taken apart, has no tensors in safetensors, or is of a
            family that was not named.
        StateMismatch: The tensors are not those of such a model.
        OSError: A file cannot be read.
    """
    is_ours = configuration is not None
    config = _config(folder, configuration) if configuration is not None else _of_elsewhere(folder, described)
    if problem := family_problem(config, named, str(folder), NAMING):
        raise ConfigError(problem)
    family = hf_family(config)
    stored = StoredModel(Repository(str(folder)), family)
    for index in range(family.num_units):
        stored.require_size(index)

    @lru_cache(maxsize=1)
    def state_of(index: int) -> dict[str, Tensor]:
        return dict(stored.unit(index).state_dict())

    def read(name: str) -> Tensor:
        index, inner = family.unit_of(name)
        return state_of(index)[inner]

    shapes = {entry.name: entry.shape for layout in stage_layouts(config) for entry in layout.entries}
    return ModelSource(
        folder,
        config,
        shapes,
        read,
        tokenizer=own_tokenizer(folder),
        is_bytes=config.data.has_bytes if is_ours else tokens_are_bytes(folder, family.config.vocab_size),
        context=None if is_ours else family.positions,
    )


def _of_elsewhere(folder: Path, described: Mapping[str, Any]) -> Config:
    positions = described.get("max_position_embeddings")
    context = min(_CONTEXT, positions) if type(positions) is int and positions > 0 else _CONTEXT
    values: dict[str, Any] = {
        "model": {"family": FAMILY, "hf_config": of_the_model(described)},
        "data": {"seq_len": context},
    }
    family = hf_family(_config(folder, values))
    # The stage of tied embeddings has the last unit as well.
    first = 2 if family.is_tied else 1
    return _config(folder, {**values, "model_pipeline": {"cut": [first, *[1] * (family.num_units - first)]}})


def _config(folder: Path, values: Mapping[str, Any]) -> Config:
    with describing_model(folder):
        return Config.model_validate({**values, "device": "cpu", "quant": None})
