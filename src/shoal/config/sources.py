"""One layer of configuration from each source (file, environment, flags), as nested mappings with canonical keys.

Nothing is validated here but names and shape: the schema does the rest once the layers are merged. Every layer
remembers for each key where it came from, so that an error can say which file, variable or flag to change. What is
wrong is noted in the layer and left out of its values: the user hears of everything at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shoal.config.base import Section
from shoal.config.distqat_names import FILES_ELSEWHERE, REMOVED, is_of_distqat
from shoal.config.keys import ALIASES, Key, flag_names, item_section_of, keys, nearest, plain, section_of, unknown_key
from shoal.config.yaml_text import parsed_yaml
from shoal.errors import ConfigError

_SHIPPED = Path(__file__).parents[1] / "configs"
"""The configuration files that come with shoal."""

ENV_PREFIX = "SHOAL_"
ENV_SEPARATOR = "__"

# Variables with the prefix that are no configuration: switches of the test suite; see CONTRIBUTING.md.
ENV_RESERVED = frozenset({"SHOAL_PORTABLE", "SHOAL_REQUIRE_ALL"})


@dataclass(slots=True)
class Layer:
    """Values from one source.

    Attributes:
        values: nested mappings with canonical names.
        origins: for each dotted key, where its value stands, in words.
        problems: what is wrong with names and shapes, one line each.
    """

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])

    def put(self, name: str, value: object, origin: str) -> None:
        """Set the key with the dotted `name`, which replaces what was set below it."""
        *sections, leaf = name.split(".")
        target = self.values
        for section in sections:
            inner = target.get(section)
            if not isinstance(inner, dict):
                inner = target[section] = {}
            target = cast(dict[str, Any], inner)
        target[leaf] = value
        self.origins[name] = origin

    def drop(self, name: str) -> None:
        """Leave out the key with the dotted `name`, which is in a section."""
        section, _, leaf = name.partition(".")
        values = self.values.get(section)
        if isinstance(values, dict):
            cast(dict[str, Any], values).pop(leaf, None)
        self.origins.pop(name, None)

    def merge(self, above: "Layer") -> None:
        """Lay another layer over this one: its values win, key by key."""
        _merge(self.values, above.values)
        self.origins |= above.origins
        self.problems += above.problems


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            _merge(below[name], cast(dict[str, Any], value))
        else:
            below[name] = value


def from_file(path: Path) -> Layer:
    """Read a YAML file.

    Raises:
        ConfigError: as `read_file`.
    """
    values = read_file(path)
    layer = from_mapping(values, str(path))
    if is_of_distqat(values):
        layer.problems.append(
            f"{path}: it has keys of DistQat (aether): `shoal config convert {path} > mine.yaml` translates it"
        )
    return layer


def read_file(path: Path) -> Mapping[Any, Any]:
    """Return the mapping that a YAML file holds, as it stands there; an empty file holds an empty one.

    Raises:
        ConfigError: there is no such file, it is no YAML mapping, or as `parsed_yaml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = f": {FILES_ELSEWHERE[path.stem]}" if path.stem in FILES_ELSEWHERE else ""
        raise ConfigError(f"there is no configuration file {path}{reason}{_other_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    loaded = parsed_yaml(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a {type(loaded).__name__}")
    return cast(dict[Any, Any], loaded)


def _other_files(path: Path) -> str:
    """Return a hint at the file that the user may have meant, there or of those that come with shoal, or at those that
    do exist there."""
    shipped = {file.stem: f"configs/{file.name}" for file in _SHIPPED.glob("*.yaml")}
    there = {file.stem: str(file) for file in path.parent.glob("*.yaml")}
    meant = shipped | there
    near = None if path.stem in FILES_ELSEWHERE else nearest(path.stem, meant)
    if near is not None:
        return f"; did you mean {meant[near]}?"
    if not there:
        return f"; there is none in {path.parent.resolve()}"
    return f"; {path.parent} holds {', '.join(f'{stem}.yaml' for stem in sorted(there))}"


def from_mapping(values: Mapping[Any, Any], origin: str) -> Layer:
    """Take nested mappings, with dots allowed in keys, and translate aliases."""
    layer = Layer()
    for name, value in _leaves(values, "", origin, layer.problems):
        if name in layer.origins:
            layer.problems.append(f"{origin}: {name} is given twice, under two names; remove one")
        else:
            layer.put(name, value, origin)
    return layer


def _leaves(values: Mapping[Any, Any], prefix: str, origin: str, problems: list[str]) -> Iterator[tuple[str, object]]:
    """Yield (dotted canonical key, value) for everything that `values` sets rightly, and note the rest."""
    for given, value in values.items():
        name = ALIASES.get(f"{prefix}{given}", f"{prefix}{given}")
        key = keys().get(name)
        if key is None:
            problems.append(unknown_key(name, origin, [known for known in keys() if known.startswith(prefix)]))
            continue
        inner, item = section_of(key.info), item_section_of(key.info)
        if inner is not None and isinstance(value, Mapping):
            if not value and key.accepts_none:
                yield name, {}
            yield from _leaves(cast(Mapping[Any, Any], value), f"{name}.", origin, problems)
        elif inner is not None and value is None and not key.accepts_none:
            continue  # `data:` with nothing below it
        elif inner is not None and not _is_alternative(key, value):
            problems.append(f"{origin}: {name} = {value!r}: is a section and needs `key: value` lines below it")
        elif unknown := _unknown_in_items(value, item, name, origin):
            problems.extend(unknown)
        else:
            yield name, value


def _is_alternative(key: Key, value: object) -> bool:
    """Return whether a section may be given as a plain value instead: null, or a word such as `off`."""
    return (value is None and key.accepts_none) or (isinstance(value, str | bool) and key.accepts_word)


def _unknown_in_items(value: object, section: type[Section] | None, name: str, origin: str) -> list[str]:
    """Return what is wrong with the keys of a list's items, where these are sections."""
    if section is None or not isinstance(value, list):
        return []
    candidates = [f"{name}.{field}" for field in section.model_fields]
    problems: list[str] = []
    for item in cast(list[object], value):
        given = cast(dict[str, object], item) if isinstance(item, dict) else {}
        unknown = [key for key in given if key not in section.model_fields]
        problems += [unknown_key(f"{name}.{key}", origin, candidates) for key in unknown]
    return problems


def from_env(env: Mapping[str, str]) -> Layer:
    """Take the variables `SHOAL_*`: `SHOAL_DILOCO__INNER_STEPS` is `diloco.inner_steps`."""
    layer = Layer()
    by_variable = {variable_of(name): name for name in (*ALIASES, *keys())}
    for variable, text in sorted(env.items()):
        if not variable.startswith(ENV_PREFIX) or variable in ENV_RESERVED:
            continue
        given = by_variable.get(variable.upper())
        origin = f"environment variable {variable}"
        if given is None:
            wanted = variable.removeprefix(ENV_PREFIX).lower().replace(ENV_SEPARATOR, ".")
            right = flag_names().get(plain(wanted))
            if right is not None and wanted not in REMOVED:
                layer.problems.append(f"{origin} names no key; did you mean {variable_of(right)}?")
            else:
                layer.problems.append(unknown_key(wanted, origin, keys()))
            continue
        layer.merge(from_text(keys()[ALIASES.get(given, given)], text, origin))
    if env.get("HF_TOKEN") and "data.hf_token" not in layer.origins:
        layer.put("data.hf_token", env["HF_TOKEN"], "environment variable HF_TOKEN")
    return layer


def variable_of(name: str) -> str:
    """Return the environment variable of a dotted key."""
    return ENV_PREFIX + name.replace(".", ENV_SEPARATOR).upper()


def from_text(key: Key, text: str, origin: str) -> Layer:
    """Take the text that a flag or a variable gives for one key; structures are YAML or JSON."""
    value: object = text
    if key.accepts_none and text.strip().lower() in ("null", "none"):
        value = None
    elif key.is_structure and not key.is_word_list:
        try:
            value = parsed_yaml(text, origin)
        except ConfigError as error:
            return Layer(problems=[f"{error}; {key.name} needs YAML or JSON"])
    return from_value(key, value, origin)


def from_value(key: Key, value: object, origin: str) -> Layer:
    """Take the value of one key."""
    nested = value
    for part in reversed(key.name.split(".")):
        nested = {part: nested}
    return from_mapping(cast(dict[str, Any], nested), origin)
