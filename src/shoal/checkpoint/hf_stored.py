"""The units of a model of the family hf as a folder of transformers, or a repository of the hub, has them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, cast

from torch import Tensor, nn

from shoal.checkpoint.tensor_file import TensorFile
from shoal.config.schema import Config
from shoal.errors import MALFORMED, ConfigError, StateMismatch
from shoal.model.hf.family import HfFamily
from shoal.model.hf.repository import Repository
from shoal.model.meta import build_without_values
from shoal.model.registry import load_family
from shoal.model.seeding import seeded

_MOST_TIMES: Final = 4
"""So many times the elements that there are is a unit given memory for; then each missing one is named."""
TENSORS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_LONGEST_NAME: Final = 200


class StoredTensors:
    """The tensors of a model of transformers by their keys: in one file, or in those that an index names.

    They are read one at a time; a file is opened, and fetched from the hub, for the first of its tensors.

    Raises:
        ConfigError: There are none in this form.
        StateMismatch: The index, or the only file, is damaged.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._file = cache(self._open)
        self._files = self._found()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def shape(self, key: str) -> tuple[int, ...]:
        """Its shape. Raises as `read`."""
        return self._of(key).shapes[key]

    def read(self, key: str) -> Tensor:
        """Read a tensor, in memory of its own.

        Raises:
            ConfigError: The hub does not give its file.
            StateMismatch: The file is damaged, or has no such tensor.
            OSError: The file cannot be read.
        """
        return self._of(key).read(key)

    def read_into(self, key: str, out: Tensor) -> None:
        """See `TensorFile.read_into`. Raises as `read`."""
        self._of(key).read_into(key, out)

    def _found(self) -> Mapping[str, str]:
        """The file of each key."""
        name = self._repository.name
        index = self._path_or_none(INDEX)
        if self._path_or_none(TENSORS) is not None:
            return dict.fromkeys(self._file(TENSORS).shapes, TENSORS)
        if index is None and self._repository.folder is None:
            self._repository.path(TENSORS)  # says why it is not there
        if index is None:
            raise ConfigError(
                f"{name} has no {TENSORS}: shoal reads no pickled weights; save the model with transformers' "
                "save_pretrained, which writes safetensors"
            )
        return _files_by(index)

    def _path_or_none(self, file: str) -> Path | None:
        try:
            return self._repository.path(file)
        except ConfigError:
            return None

    def _of(self, key: str) -> TensorFile:
        name = self._files[key]
        file = self._file(name)
        if key not in file.shapes:
            raise StateMismatch(f"{self._repository.name}: {name} has no {key}, against what {INDEX} says")
        return file

    def _open(self, file: str) -> TensorFile:
        return TensorFile(self._repository.path(file))


def _files_by(index: Path) -> dict[str, str]:
    try:
        files = cast("dict[str, str]", json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(files.values()))
        odd = [name for name in names if Path(name).name != name or len(name) > _LONGEST_NAME]
    except (KeyError, TypeError, AttributeError, OSError, *MALFORMED) as error:
        raise ConfigError(f"{index} is no index of tensors: {type(error).__name__}: {error}") from None
    if odd or not names:
        what = f"names {odd[0][:80]!r}, which is no file beside it" if odd else "names no file"
        raise StateMismatch(f"{index} {what}: take the folder as it was")
    return files


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
