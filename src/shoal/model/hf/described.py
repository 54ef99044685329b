"""What `model.*` says of a model of transformers, as the values of its config. No torch and no transformers.

config.json of model.name_or_path   read once, where a run begins; from then on model.hf_config holds it
model.extra                         over it, key by key
model.tie                           over both
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, cast

from shoal.errors import MALFORMED, ConfigError
from shoal.model.hf.repository import CONFIG, INSTALL, Repository

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig

FAMILY: Final = "hf"
SPEECH: Final = "wav2vec2"
OF_TRANSFORMERS: Final = (FAMILY, SPEECH)
"""Families that transformers has the code of."""
# Of stored weights, of tasks with classes, of programs: nothing that a model trained from its config depends on.
_NOT_OF_THE_MODEL: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "id2label",
        "label2id",
        "quantization_config",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
    }
)
_IMPLEMENTATIONS: Final = ("attn_implementation", "experts_implementation")
_OWN_CODE: Final = ("eager", "sdpa", "batched_mm", "grouped_mm")
"""Of transformers and torch. In place of flash attention transformers may take a kernel of the hub."""


def with_hf_config(model: ModelConfig) -> ModelConfig:
    """Return the model with what the config.json of `name_or_path` says, if it names one and that is not known yet.

    Raises:
        ConfigError: There is no such folder, or no such model on the hub, or its config.json is none.
    """
    if model.family not in OF_TRANSFORMERS or model.name_or_path is None or model.hf_config is not None:
        return model
    repository = Repository.of(model)
    path = repository.path(CONFIG)
    try:
        content: object = json.loads(path.read_bytes())
        said = of_the_model(cast("dict[str, Any]", content)) if isinstance(content, dict) else {}
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"model.name_or_path = {model.name_or_path}: {path} cannot be read ({error})") from error
    if "model_type" not in said:
        raise ConfigError(
            f"model.name_or_path = {model.name_or_path}: {path} names no model_type, so it describes no model of "
            "transformers; give the folder of one"
        )
    return model.model_copy(update={"hf_config": said, "commit": repository.commit_of(path)})


def config_values(model: ModelConfig) -> dict[str, Any]:
    """Return what transformers is told of a model, `model_type` included.

    Raises:
        ConfigError: As `with_hf_config`, or nothing says which kind of model it is.
    """
    # Again: what a host has from a run, somebody else may have written.
    said = of_the_model(with_hf_config(model).hf_config or {})
    if odd := [key for key in model.extra if key in _NOT_OF_THE_MODEL]:
        raise ConfigError(
            f"model.extra.{odd[0]} means nothing to a model that begins from random weights in float32, by the code of "
            "transformers; remove it"
        )
    values = {**said, **model.extra}
    _require_no_foreign_code(values)
    if model.family == SPEECH:
        values.setdefault("model_type", SPEECH)
    if not isinstance(values.get("model_type"), str):
        raise ConfigError(
            "model.family = hf: say which model by model.name_or_path (a folder with config.json, or a name on the "
            "hub), or its kind by model.extra, as {model_type: qwen3, hidden_size: 256, num_hidden_layers: 4}"
        )
    if model.tie is not None:
        values["tie_word_embeddings"] = model.tie
    return values


def kind_of(model: ModelConfig) -> str | None:
    """Return the `model_type` as far as it is known without reading a file; it may be any text."""
    kind = model.extra.get("model_type", (model.hf_config or {}).get("model_type"))
    return kind if isinstance(kind, str) else None


def transformers_version() -> str:
    """Return which transformers is installed.

    Raises:
        ConfigError: None is.
    """
    try:
        return version("transformers")
    except PackageNotFoundError as error:
        raise ConfigError(f"model.family = hf needs the package transformers, which is not here: {INSTALL}") from error


def is_before(found: str, least: tuple[int, int]) -> bool:
    """Return whether a version is an earlier one."""
    return tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < least


def of_the_model(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of the model alone."""
    return {key: _said_in_json(value) for key, value in said.items() if key not in _NOT_OF_THE_MODEL}


def _said_in_json(value: object) -> object:
    """JSON has no infinity: transformers says it by an object, and some files by a word that only Python reads."""
    if isinstance(value, dict):
        return {key: _said_in_json(each) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_said_in_json(each) for each in cast("list[object]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    return value


def _require_no_foreign_code(values: Mapping[str, Any]) -> None:
    """By most other names transformers may fetch a kernel from the hub, and run it."""
    for key, value in values.items():
        is_concerned = key.strip("_").startswith(_IMPLEMENTATIONS)
        if is_concerned and any(name not in _OWN_CODE for name in _texts(value)):
            raise ConfigError(
                f"{key} = {value!r} may be code of somebody on the hub, which no run may name; use one of "
                f"{', '.join(_OWN_CODE)}"
            )
        nested = cast("list[Any]", value) if isinstance(value, list) else [value]
        for each in nested:
            if isinstance(each, dict):
                _require_no_foreign_code(cast("dict[str, Any]", each))


def _texts(value: object) -> list[str]:
    """All texts in a value."""
    if isinstance(value, dict):
        return [text for each in cast("dict[str, object]", value).values() for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in cast("list[object]", value) for text in _texts(each)]
    return [value] if isinstance(value, str) else []
