"""From file, environment and flags to one checked `Config`: flags beat environment beats file beats defaults."""

import copy
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.config.base import split_list
from shoal.config.flags import from_flags
from shoal.config.keys import SECRETS, keys
from shoal.config.schema import AS_RUN, FOUND_BY, SHARED_SECTIONS, UNITS_BY, Config
from shoal.config.sources import Layer, from_env, from_file, from_mapping
from shoal.errors import ConfigError

_REASONS = {
    "missing": "is required",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be `key: value` pairs",
    "model_type": "must be `key: value` pairs",
    "literal_error": "must be {expected}",
    "extra_forbidden": "is no key",
    "too_short": "must name at least {min_length}",
    "too_long": "must name at most {max_length}",
    "string_too_short": "must not be empty",
    "path_type": "must be a path",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
_CUT_BY = ("model_pipeline.stages", "model_pipeline.cut")


def load_config(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    other_flags: Iterable[str] = (),
) -> Config:
    """Read the configuration of a run.

    Args:
        path: a YAML file; None starts from the defaults.
        overrides: values that win over everything else: nested or dotted keys, or a list of command-line flags.
        env: the environment, of which `SHOAL_<SECTION>__<KEY>` and `HF_TOKEN` are read; None takes the process's own.
        other_flags: flags that the caller handles itself, as suggestions for unknown ones.

    Raises:
        ConfigError: a missing file, an unknown key, a wrong type or a combination that cannot run; the message has a
            line for each, with the key, the value, where it stands, and what to do.
    """
    config, _ = load_with_origins(path, overrides, env, other_flags=other_flags, is_run=True)
    return config


def load_with_origins(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    other_flags: Iterable[str] = (),
    run: Mapping[str, Any] | None = None,
    is_left: bool = False,
    is_run: bool = False,
) -> tuple[Config, Mapping[str, str]]:
    """Return what this host says, and for each dotted key that was set the file, variable or flag that did.

    Unless `is_run` it may be no run by itself: a host that joins takes the rest from the run.

    Args:
        run: the shared configuration of a run, for what this host does not say; if empty, nothing that is shared
            counts, since the run is not known yet.
        is_left: the file is what that run has left, whose cut counts only with its number of stages and of units.
        is_run: it has to be a run by itself.

    Raises:
        ConfigError: as `load_config` does.
    """
    decided, layer = Layer(copy.deepcopy(dict(run or {}))), Layer()
    is_file_read = True
    if path is not None:
        try:
            (decided if is_left else layer).merge(from_file(Path(path)))
        except ConfigError as error:
            layer.problems.append(str(error))
            is_file_read = False
    layer.merge(from_env(os.environ if env is None else env))
    if isinstance(overrides, Mapping):
        layer.merge(from_mapping(overrides, "override"))
    elif overrides is not None:
        layer.merge(from_flags(overrides, other_flags))
    if not layer.origins.keys().isdisjoint(_CUT_BY):
        for name in _CUT_BY:
            decided.drop(name)
    elif not layer.origins.keys().isdisjoint(UNITS_BY):
        decided.drop("model_pipeline.cut")
    for name, found in FOUND_BY.items():
        if name in layer.origins and _value(layer, name) != _value(decided, name):
            for each in found:
                decided.drop(each)
    decided.merge(layer)
    layer = decided
    if run == {}:
        layer.values = {name: value for name, value in layer.values.items() if name not in SHARED_SECTIONS}
    _read_address_files(layer)
    try:
        config = Config.model_validate(layer.values, context=AS_RUN if is_run else None)
    except ValidationError as error:
        # What does not go together may be the fault of what is left out.
        is_whole = is_file_read and not layer.problems
        raise ConfigError("\n".join((*layer.problems, *_explain(error, layer, is_whole=is_whole)))) from None
    if layer.problems:
        raise ConfigError("\n".join(layer.problems))
    return config, layer.origins


def problems_of(values: Mapping[str, Any], origin: str, *, is_whole: bool) -> list[str]:
    """Return why no run can be made of these values, a line for each thing that is wrong.

    Args:
        origin: where they stand, in words.
        is_whole: they are all that is said; else nothing is said of combinations, which others of them may make right.
    """
    layer = from_mapping(values, origin)
    is_whole = is_whole and not layer.problems
    try:
        Config.model_validate(layer.values, context=AS_RUN)
    except ValidationError as error:
        return [*layer.problems, *_explain(error, layer, is_whole=is_whole)]
    return layer.problems


def config_from_json(text: str | bytes) -> Config:
    """Return the configuration that `dump.config_to_json` wrote, secrets included."""
    return Config.model_validate_json(text)


def _value(layer: Layer, name: str) -> Any:
    section, _, leaf = name.partition(".")
    values = layer.values.get(section)
    return cast("dict[str, Any]", values).get(leaf) if isinstance(values, dict) else None


def _read_address_files(layer: Layer) -> None:
    """Replace each `@file` in the list of initial peers by the addresses in that file."""
    network = layer.values.get("network")
    if not isinstance(network, dict) or "initial_peers" not in network:
        return
    section = cast(dict[str, object], network)
    try:
        addresses = split_list(section["initial_peers"])
    except ValueError:
        return  # the schema says what is wrong
    if not isinstance(addresses, list):
        return
    expanded: list[object] = []
    for address in cast(list[object], addresses):
        if isinstance(address, str) and address.startswith("@"):
            try:
                text = Path(address[1:]).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                layer.problems.append(f"network.initial_peers: cannot read {address[1:]}: {reason}")
                continue
            expanded.append("\n".join(line.partition("#")[0] for line in text.splitlines()))
        else:
            expanded.append(address)
    section["initial_peers"] = expanded


def _explain(error: ValidationError, layer: Layer, *, is_whole: bool) -> list[str]:
    """Return one line for each thing that is wrong; of combinations of keys only where all that was said `is_whole`."""
    details = [detail for detail in error.errors(include_url=False) if is_whole or detail["loc"]]
    # A union reports each of its types; the one for a plain word says nothing to whoever wrote a mapping.
    telling = [d for d in details if not any(str(part).startswith("literal[") for part in d["loc"])]
    # A list whose only item is wrong is said to be empty as well.
    lists = {detail["loc"][:-1] for detail in telling if detail["loc"]}
    telling = [d for d in telling if d["type"] != "too_short" or d["loc"] not in lists]
    lines = [_line(detail, layer) for detail in telling or details]
    return list(dict.fromkeys(lines))


def _line(detail: ErrorDetails, layer: Layer) -> str:
    message = reason_of(detail)
    name = _dotted(detail["loc"])
    if not name:
        return message
    origin = _origin(name, layer)
    where = f" ({origin})" if origin else ""
    if detail["type"] == "missing":
        return f"{name}{where}: {message}"
    value = "<secret>" if name in SECRETS else repr(detail["input"])
    return f"{name} = {value}{where}: {message[:1].lower()}{message[1:]}"


def why_invalid(error: TypeError | ValidationError) -> str:
    """Return why values from elsewhere, as the folder of a model, are no configuration: a part for each key."""
    if isinstance(error, TypeError):
        return str(error)
    details = error.errors(include_url=False)
    return "; ".join(": ".join(filter(None, (_dotted(detail["loc"]), reason_of(detail)))) for detail in details)


@contextmanager
def describing_model(where: Path) -> Generator[None]:
    """Inside, values that are no configuration become a ConfigError: the files of a model have said them."""
    try:
        yield
    except (TypeError, ValidationError) as error:
        raise ConfigError(f"{where} does not describe a model of this version of shoal: {why_invalid(error)}") from None


def reason_of(detail: ErrorDetails) -> str:
    """Return what is wrong, in the words of a user rather than of the validator."""
    template = _REASONS.get(detail["type"])
    if template is not None:
        return template.format(**detail.get("ctx", {}))
    return detail["msg"].removeprefix("Value error, ")


def _dotted(loc: tuple[int | str, ...]) -> str:
    """Return a location as a key; the names of union members that pydantic puts in between are left out."""
    parts = [part for part in loc if isinstance(part, int) or part.islower()]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _origin(name: str, layer: Layer) -> str | None:
    """Return where the value of a key stands, or that of the section or list around it."""
    base = name.partition("[")[0]
    while base:
        if base in layer.origins:
            return layer.origins[base]
        base = base.rpartition(".")[0] if base in keys() or "." in base else ""
    return None
