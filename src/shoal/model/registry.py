"""From `model.family` to a family: the native ones by name, a user's own by `package.module:Class`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from shoal.config.own_class import own_class
from shoal.config.training import LENGTHS
from shoal.errors import ConfigError
from shoal.model.biggan import BigganFamily
from shoal.model.gpt import GptFamily
from shoal.model.hf.family import HfFamily
from shoal.model.hf.speech import Wav2Vec2Family
from shoal.model.mlp import MlpFamily
from shoal.model.own_errors import asked
from shoal.model.own_family import require_sound
from shoal.model.resnet import ResNetFamily
from shoal.model.stage import Family

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.schema import Config
    from shoal.config.training import DataConfig

NATIVE_FAMILIES: dict[str, type[Family]] = {
    "gpt": GptFamily,
    "mlp": MlpFamily,
    "resnet18": ResNetFamily,
    "resnet50": ResNetFamily,
    "resnet101": ResNetFamily,
    "biggan": BigganFamily,
    "hf": HfFamily,
    "wav2vec2": Wav2Vec2Family,
}


def load_family(model: ModelConfig, data: DataConfig) -> Family:
    """Builds the family that `model.family` names.

    Raises:
        ConfigError: There is no such family, its module cannot be imported, it is no `Family`, it raises or says what
            it must not, or its loss is not computed in chunks where that is wanted, or it has another context than
            samples have.
    """
    family = _made(family_class(model.family), model, data)
    if model.loss_chunk_tokens is not None and family.loss_chunk_tokens is None:
        raise ConfigError(
            f"model.loss_chunk_tokens = {model.loss_chunk_tokens}: the loss of model.family = {model.family} is not "
            "computed in chunks of tokens; remove the key"
        )
    given, wanted = set(data.context), family.context_specs().keys()
    if LENGTHS in given - wanted:
        raise ConfigError(
            f"data.task_type = {data.task_type} has clips of many lengths, and model.family = {model.family} does not "
            f"ask for them: its context_specs have no {LENGTHS}"
        )
    if given - wanted:
        raise ConfigError(
            f"data.messages_column = {data.messages_column} packs several conversations into a sample, and "
            f"model.family = {model.family} does not see them apart: its context_specs have no positions"
        )
    if odd := sorted(wanted - given):
        raise ConfigError(
            f"model.family = {model.family}: its context_specs want {', '.join(odd)} of each sample, which "
            f"data.dataset_name = {data.dataset_name} does not give; positions come with data.messages_column, "
            f"{LENGTHS} with data.task_type = speech"
        )
    return family


def _made(kind: type[Family], model: ModelConfig, data: DataConfig) -> Family:
    if model.family in NATIVE_FAMILIES:
        return kind.from_config(model, data)
    with asked(kind, "from_config"):
        family = kind.from_config(model, data)
    require_sound(family, kind)
    return family


def is_wrapped(config: Config) -> bool:
    """Whether the first stage of a run's model has its last unit as well, see `model.partition`.

    Raises:
        ConfigError: As `load_family`.
    """
    if config.num_stages == 1 or family_class(config.model.family).is_tied is Family.is_tied:
        return False
    return load_family(config.model, config.data).is_tied


def load_exact_family(model: ModelConfig, data: DataConfig) -> Family:
    """As `load_family`, before a host computes: with what it has installed a model may not be the same when it is cut.

    Raises:
        ConfigError: As `load_family`, or the model must not be trained in stages here.
    """
    family = load_family(model, data)
    if (problem := family.exactness_problem()) is not None:
        raise ConfigError(problem)
    return family


def family_class(name: str) -> type[Family]:
    """Finds the class of a family by its native name or as `package.module:Class`. Nothing is evaluated, only imported.

    Raises:
        ConfigError: As `load_family`.
    """
    if name in NATIVE_FAMILIES:
        return NATIVE_FAMILIES[name]
    if ":" not in name:
        raise ConfigError(
            f"model.family: there is no family {name!r}; choose {', '.join(NATIVE_FAMILIES)}, or name your own as "
            "package.module:Class"
        )
    found = own_class(name, "model.family")
    if not (inspect.isclass(found) and issubclass(found, Family)):
        raise ConfigError(f"model.family: {name} is not a subclass of shoal.model.stage.Family; derive it from that")
    missing: frozenset[str] = found.__abstractmethods__
    if missing:
        raise ConfigError(f"model.family: {name} does not define {', '.join(sorted(missing))}; add these methods")
    return found
