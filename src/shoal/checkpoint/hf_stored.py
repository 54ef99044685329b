"""The units of a model of the family hf as a folder of transformers, or a repository of the hub, has them."""

from __future__ import annotations

import math
from typing import Final

from torch import nn

from shoal.checkpoint.hf_files import StoredTensors
from shoal.config.schema import Config
from shoal.errors import ConfigError, StateMismatch
from shoal.model.hf.family import HfFamily
from shoal.model.hf.repository import Repository
from shoal.model.meta import build_without_values
from shoal.model.registry import load_family
from shoal.model.seeding import seeded

_MOST_TIMES: Final = 4
"""So many times the elements that there are is a unit given memory for; then each missing one is named."""


def hf_family(config: Config) -> HfFamily:
    """Return the family of a configuration that names it.

    Raises:
        ConfigError: The configuration describes no model.
    """
    family = load_family(config.model, config.data)
    if not isinstance(family, HfFamily):
        raise ConfigError(f"the family {config.model.family} is no model of transformers")
    return family


class StoredModel:
    """The units of a model as a repository has them. Only the files of the units that are read are opened.

    Raises:
        ConfigError: The repository has no tensors in safetensors.
        StateMismatch: Its tensors are of another model.
    """

    def __init__(self, repository: Repository, family: HfFamily) -> None:
        self._name = repository.name
        self._family = family
        self._tensors = StoredTensors(repository)
        try:
            self._keys = family.stored.keys_of(self._tensors)
        except StateMismatch as error:
            described = "that config.json describes (with what model.extra, if given, says instead)"
            raise StateMismatch(f"{self._name} is not of the model {described}: {error}") from error

    def require_size(self, index: int) -> None:
        """Compare sizes before a unit gets its memory: what config.json says may be anything.

        Raises:
            StateMismatch: The unit is far larger than its tensors.
        """
        unit = build_without_values(self._family, index, 0)
        described = sum(tensor.numel() for tensor in unit.state_dict().values())
        there = sum(math.prod(self._tensors.shape(key)) for key in self._keys[index])
        if described > _MOST_TIMES * there:
            raise StateMismatch(
                f"{self._family.unit_name(index)} in {self._name} has {there} elements in the files, and config.json "
                f"makes it {described}: take the folder as it was written"
            )

    def unit(self, index: int) -> nn.Module:
        """Build a unit with the values in the files.

        Raises:
            ConfigError: The hub does not give a file.
            StateMismatch: The tensors are not those of the unit.
            OSError: A file cannot be read.
        """
        self.require_size(index)
        with seeded(0):
            unit = self._family.build_unit(index)
        self.fill(index, unit)
        return unit

    def fill(self, index: int, unit: nn.Module) -> None:
        """Give a unit the values in the files. Raises as `unit`."""
        try:
            self._family.stored.load(index, unit, self._keys[index], self._tensors)
        except StateMismatch as error:
            raise StateMismatch(f"{self._family.unit_name(index)} in {self._name}: {error}") from error
