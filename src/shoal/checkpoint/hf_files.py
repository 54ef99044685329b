"""The tensors of a model of transformers by their keys: in one file, or in those that an index names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, cast

from torch import Tensor

from shoal.checkpoint.tensor_file import TensorFile
from shoal.errors import MALFORMED, ConfigError, StateMismatch
from shoal.model.hf.repository import Repository

TENSORS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_LONGEST_NAME: Final = 200


class StoredTensors:
    """They are read one at a time; a file is opened, and fetched from the hub, for the first of its tensors.

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
