"""The files of tensors in a folder of transformers: one, or those that an index names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, cast

from shoal.checkpoint.tensor_file import TensorFile
from shoal.errors import ConfigError, StateMismatch

TENSORS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"


def tensor_files(folder: Path) -> list[TensorFile]:
    """Open them.

    Raises:
        ConfigError: There are none in this form.
        StateMismatch: One is damaged.
    """
    if (folder / TENSORS).is_file():
        return [TensorFile(folder / TENSORS)]
    try:
        index = json.loads((folder / INDEX).read_bytes())
        names = sorted(set(cast("dict[str, str]", index["weight_map"]).values()))
        odd = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {TENSORS}: shoal reads no pickled weights; save the model with transformers' "
            "save_pretrained, which writes safetensors"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ConfigError(f"{folder / INDEX} is no index of tensors: {type(error).__name__}: {error}") from None
    if odd or not names:
        what = f"names {odd[0]!r}, which is not in the folder" if odd else "names no file"
        raise StateMismatch(f"{folder / INDEX} {what}: take the folder as it was")
    return [TensorFile(folder / name) for name in names]
