"""What is used of transformers: configs, and models without memory. It is imported when a model of it is trained."""

from __future__ import annotations

import copy
import difflib
import importlib
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.ids import MAX_PARTS
from shoal.model.hf.described import INSTALL, is_before, transformers_version
from shoal.model.stage import default_float32
from shoal.model.valueless import WithoutValues

_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers")
_FLOAT: Final = "__float__"
_LEAST_VERSION: Final = (5, 9)
_NUMBER_OF_PARTS: Final = re.compile(r"(\w*_)?n(um)?_\w*(layer|expert|label)s?|\w*_layers")
"""What configs call how many there are of what they list, as num_hidden_layers, n_layer, num_local_experts."""
# What configs take by these names, and keep by others.
_OLD_NAMES: Final = frozenset({"attn_implementation", "experts_implementation", "rope_scaling", "rope_theta"})


def is_kind(name: str) -> bool:
    """Whether this is a model_type.

    Raises:
        ConfigError: transformers is not installed.
    """
    return name in transformers_package().CONFIG_MAPPING


def model_config(values: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
    """Make the config of a model, which trains in float32 and keeps no cache.

    Args:
        values: `model_type` and what else is said.
        named: Those of the values that a person has given by `model.extra`.

    Raises:
        ConfigError: There is no such kind of model, or a value is none of it.
    """
    transformers = transformers_package()
    given = dict(values)
    kind: str = given.pop("model_type")
    kinds: list[str] = list(transformers.CONFIG_MAPPING)
    if kind not in kinds:
        near = ", ".join(difflib.get_close_matches(kind, kinds)) or "as in the config.json of a model"
        raise ConfigError(
            f"model_type = {kind}: transformers {transformers.__version__} knows no such model; did you mean {near}?"
        )
    # The fastest kernels for experts take no float64, and are not the same on every processor.
    given.setdefault("experts_implementation", "eager")
    _require_few_parts(kind, given)
    try:
        config = transformers.AutoConfig.for_model(kind, **{name: _special(value) for name, value in given.items()})
    except Exception as error:  # of the validators of transformers, which are many
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"model.extra and config.json do not describe a {kind}: {reason}") from error
    if missing := [name for name in _SIZES if not _is_size(getattr(config, name, None))]:
        raise ConfigError(
            f"{kind} of transformers has no {' and no '.join(missing)}, so it is no causal language model that can be "
            "cut; of a model of text and images take the model of text, as gemma3_text"
        )
    _require_known(kind, config, named)
    return config


def build_without_memory(config: Any) -> Any:
    """Build the causal language model of a config on the meta device, in training mode and without values.

    Raises:
        ConfigError: The config is of another kind of model, or no model can be made of it.
    """
    transformers = transformers_package()
    try:
        with torch.device("meta"), WithoutValues(), default_float32():
            model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
    except Exception as error:  # whatever the code of a model raises where sizes do not fit
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"{config.model_type} is no causal language model that can be built from this config: {reason}"
        ) from error
    return model.train()


def _require_few_parts(kind: str, values: Mapping[str, Any]) -> None:
    """Refuse numbers of layers, experts or labels that no model has: some configs list them as soon as they are made,
    also those within others."""
    many = {
        name: value
        for name, value in values.items()
        if _NUMBER_OF_PARTS.fullmatch(name) and isinstance(value, int) and value > MAX_PARTS
    }
    for inner in values.values():
        if isinstance(inner, Mapping):
            _require_few_parts(kind, cast("Mapping[str, Any]", inner))
    if many:
        named = ", ".join(f"{name} = {value}" for name, value in many.items())
        raise ConfigError(
            f"config.json or model.extra describe a {kind} with {named}, and {MAX_PARTS} are the most that are read"
        )


def build_whole(config: Any) -> Any:
    """Build the model on the CPU as transformers does, in training mode."""
    with default_float32():
        return (
            transformers_package()
            .AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
            .train()
        )


def give_values(model: Any, module: nn.Module, around: nn.Module | None = None) -> None:
    """Give a module without memory its memory, and initial values by the rules of the model that it is a part of.

    On the meta device it stays without.

    Args:
        around: A module that has it, whose rules may be about its parts.

    Raises:
        ConfigError: The rules leave a tensor out.
    """
    module.to_empty(device=torch.get_default_device())
    floats = [
        (name, tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if tensor.is_floating_point() and not tensor.is_meta
    ]
    with torch.no_grad():
        for _, tensor in floats:
            tensor.fill_(torch.nan)
        module.apply(model._init_weights)
        if around is not None:
            model._init_weights(around)
    if left := [name for name, tensor in floats if tensor.isnan().any()]:
        raise ConfigError(f"{type(model).__name__} of transformers gives no initial values to {', '.join(left[:5])}")


def speech_modules() -> Any:
    """Return the module of transformers with the parts of wav2vec2, and what makes masks of attention for them.

    Raises:
        ConfigError: transformers is not installed, or too old.
    """
    transformers_package()
    return importlib.import_module("transformers.models.wav2vec2.modeling_wav2vec2")


def give_initial_values(kind: Any, config: Any, module: nn.Module) -> None:
    """Give a module, which torch has initialised, the initial values of a model of transformers.

    Args:
        kind: The class of the model.
    """
    with torch.device("meta"), WithoutValues(), default_float32():
        model = kind(copy.deepcopy(config))
    with torch.no_grad():
        module.apply(model._init_weights)


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _special(value: Any) -> Any:
    """JSON has no infinity: a config.json says it by an object."""
    if isinstance(value, list):
        return [_special(each) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        return float(named[_FLOAT]) if named.keys() == {_FLOAT} else named
    return value


def _require_known(kind: str, config: Any, named: Mapping[str, Any]) -> None:
    """A config takes any key, and some models read keys that it does not name; one that is nearly a name is a slip."""
    usual = type(config)()
    known = {*usual.to_dict(), *usual.attribute_map, *_OLD_NAMES}
    for key in named:
        if key not in known and not hasattr(usual, key) and (near := difflib.get_close_matches(key, known)):
            raise ConfigError(
                f"model.extra.{key}: a {kind} of transformers has no such value; did you mean {' or '.join(near)}?"
            )


def transformers_package() -> Any:
    """Return the package transformers.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    found = transformers_version()
    if is_before(found, _LEAST_VERSION):
        least = ".".join(map(str, _LEAST_VERSION))
        raise ConfigError(
            f"model.family = hf needs transformers {least} or newer, of which a cut model is known to be exact, and "
            f"{found} is installed: {INSTALL}"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"transformers {found} cannot be imported ({error}): {INSTALL}") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
