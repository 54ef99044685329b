"""From `model.family` to a family: the native ones by name, a user's own by `package.module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from shoal.config.own_class import kind_of, own_class
from shoal.config.training import LENGTHS
from shoal.errors import ConfigError, MisfitError
from shoal.model.biggan import BigganFamily
from shoal.model.gpt import GptFamily
from shoal.model.hf.family import HfFamily
from shoal.model.hf.speech import Wav2Vec2Family
from shoal.model.mlp import MlpFamily
from shoal.model.own_errors import asked, configured_name
from shoal.model.resnet import ResNetFamily
from shoal.model.stage import Family, TensorSpec, checked_unit_costs
from shoal.wire.tensors import ITEM_BYTES

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.schema import Config
    from shoal.config.training import DataConfig

_MOST_NAMED: Final = 6
"""Problems that are named: those of many units are mostly the same."""

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


def require_sound(family: object, kind: type[Family]) -> None:
    """Ask somebody's own family all that it says of itself, before anything is built of it.

    Args:
        kind: Whose `from_config` has given it.

    Raises:
        MisfitError: Some of it is wrong, or cannot be said; all of that is named.
    """
    name = configured_name(kind)
    if not isinstance(family, Family):
        raise MisfitError(
            f"model.family: from_config of {name} gives {kind_of(family)}, and has to give the family, as cls(...)"
        )
    with asked(kind, "num_units"):
        num_units = cast("object", family.num_units)
    if not isinstance(num_units, int) or num_units < 1:
        raise MisfitError(
            f"model.family: num_units of {name} is {num_units!r}, and has to be a whole number of 1 or more"
        )
    questions: dict[str, Callable[[], object]] = {"input_spec()": family.input_spec, "label_spec()": family.label_spec}
    for index in range(num_units):
        questions[f"boundary_spec({index})"] = partial(family.boundary_spec, index)
    problems = [problem for what, ask in questions.items() if (problem := _spec_problem(kind, name, what, ask))]
    try:
        with asked(kind, "unit_costs()"):
            checked_unit_costs(family)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
        raise MisfitError("\n".join([*problems[:_MOST_NAMED], *more]))


def _spec_problem(kind: type[Family], name: str, what: str, ask: Callable[[], object]) -> str | None:
    """Return what is wrong with a spec that a family gives; None: nothing."""
    try:
        with asked(kind, what):
            spec = ask()
    except MisfitError as error:
        return str(error)
    said = f"model.family: {what} of {name} gives"
    if not isinstance(spec, TensorSpec):
        return f"{said} {kind_of(spec)}, and has to give a TensorSpec"
    if spec.dtype not in ITEM_BYTES:
        return f"{said} the type {spec.dtype!r}, and has to give one of {', '.join(ITEM_BYTES)}, as text"
    shape = cast("object", spec.shape)
    sizes = cast("tuple[object, ...]", shape) if isinstance(shape, tuple) else (None,)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"{said} the shape {shape!r}, and has to give a tuple of whole numbers, that of one sample"
    return None
