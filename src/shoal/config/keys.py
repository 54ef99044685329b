"""Names of the configuration: the tree of keys, their other names, and the nearest right one for a wrong one.

A key is written with dots (`diloco.inner_steps`). Whoever comes from DistQat finds its names here as aliases; those of
its keys that have no meaning in shoal are refused with the reason, since a key that is silently ignored is worse.
"""

import difflib
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shoal.config.base import Section
from shoal.config.distqat_names import REMOVED
from shoal.config.schema import Config

ALIASES = {
    "diloco.averaging_timeout": "diloco.averaging_timeout_s",
    "diloco.load_state_timeout": "diloco.load_state_timeout_s",
    "diloco.grad_clip": "diloco.max_grad_norm",
    "model_pipeline.forward_timeout": "model_pipeline.forward_timeout_s",
    "model_pipeline.backward_timeout": "model_pipeline.backward_timeout_s",
    "param_mirror.refresh_every": "param_mirror.every_s",
    "initial_peers": "network.initial_peers",
    "num_servers": "servers.num_servers",
    "threads": "servers.threads",
    "nice": "servers.nice",
    "swarm_key_file": "network.swarm_key_file",
    "public_ip": "network.public_ip",
    "host_name": "network.host_name",
    "announce_maddrs": "network.announce_maddrs",
    "deterministic": "run.deterministic",
}
SECRETS = {"data.hf_token": "the environment variable HF_TOKEN"}
"""Keys whose values are shown nowhere, and what says them in place of a flag."""


@dataclass(frozen=True, slots=True)
class Key:
    """One value that can be set: its dotted name and what the schema says about it."""

    name: str
    info: FieldInfo

    @property
    def is_bool(self) -> bool:
        """Whether `--name` and `--no-name` without a value make sense."""
        return self.info.annotation is bool

    @property
    def is_structure(self) -> bool:
        """Whether the value can be a list, a mapping or a section, so that a text for it is read as YAML or JSON."""
        return any(_is_structure(option) for option in _options(self.info))

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping whose names the schema does not know."""
        return any(get_origin(option) is dict for option in _options(self.info))

    @property
    def accepts_word(self) -> bool:
        """Whether the value can be a plain word or number."""
        return any(option is not type(None) and not _is_structure(option) for option in _options(self.info))

    @property
    def accepts_none(self) -> bool:
        """Whether the words `null` and `none` mean no value."""
        return type(None) in _options(self.info)

    @property
    def is_word_list(self) -> bool:
        """Whether the value is a list of plain words, so that the flag may be given several times."""
        return any(get_origin(option) is tuple for option in _options(self.info)) and item_section_of(self.info) is None


def _options(info: FieldInfo) -> tuple[Any, ...]:
    """Return the members of a field's union type, or the one type."""
    annotation = info.annotation
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _is_structure(option: Any) -> bool:
    is_section = isinstance(option, type) and issubclass(option, Section)
    return is_section or get_origin(option) in (tuple, dict)


def section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section that a field holds, also where it is optional; None for a plain value or a list."""
    for option in _options(info):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def item_section_of(info: FieldInfo) -> type[Section] | None:
    """Return the section that the items of a list field are, or None."""
    for option in _options(info):
        for item in get_args(option):
            if isinstance(item, type) and issubclass(item, Section):
                return item
    return None


def walk(section: type[Section] = Config, prefix: str = "") -> Iterator[Key]:
    """Yield every key below `section` in the order of the schema, sections before their contents."""
    for name, info in section.model_fields.items():
        key = Key(prefix + name, info)
        yield key
        inner = section_of(info)
        if inner is not None:
            yield from walk(inner, key.name + ".")


@cache
def keys() -> dict[str, Key]:
    """Return all keys by dotted name."""
    return {key.name: key for key in walk()}


def plain(name: str) -> str:
    """Return a name in the form in which `a.b-c`, `a-b_c` and `A_B_C` are the same."""
    return re.sub(r"[._-]+", "-", name).lower()


@cache
def flag_names() -> dict[str, str]:
    """Return the dotted key for each plain name, aliases included."""
    table = {plain(name): name for name in keys()}
    table |= {plain(alias): name for alias, name in ALIASES.items()}
    return table


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most like `name`, or None if none is."""
    by_plain = {plain(candidate): candidate for candidate in candidates}
    close = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.6)
    if not close:
        # A right last part in a wrong section is as common as a typing error.
        leaf = re.split(r"[.-]", name.replace("_", "-"))[-1] if "." not in name else plain(name.rpartition(".")[2])
        ending = [text for text in by_plain if text.endswith("-" + leaf)]
        close = ending if len(ending) == 1 else []
    return by_plain[close[0]] if close else None


def within_mapping(name: str) -> str:
    """Return how a value within a key's mapping is given, if that is what a name means; else nothing."""
    for key in keys().values():
        within = name[len(key.name) + 1 :].replace("-", "_")
        if key.is_mapping and within and plain(name).startswith(plain(key.name) + "-"):
            return f"{key.name} is a mapping: give its values as --{key.name} '{{{within}: VALUE}}'"
    return ""


def unknown_key(name: str, where: str, candidates: Iterable[str]) -> str:
    """Return what is wrong with a key that does not exist, and what to do.

    Args:
        name: the dotted key as the user meant it.
        where: the file, variable or flag that has it.
        candidates: the names that would have been right.
    """
    if name in REMOVED:
        return f"{where}: {name} does not exist in shoal: {REMOVED[name]}. Remove it."
    suggestion = nearest(name, candidates)
    advice = f"did you mean {suggestion}?" if suggestion else "`shoal config keys` lists all keys."
    advice = within_mapping(name) or advice
    return f"{where}: unknown key {name}; {advice}"
