"""Writing a configuration: as YAML for people (no secrets), as JSON for own processes, as the commented reference."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from shoal.config.base import Section
from shoal.config.flags import flag_of
from shoal.config.keys import item_section_of, keys, section_of
from shoal.config.schema import Config

_WIDTH = 112
_REFERENCE_HEAD = """\
# Every key of shoal with its default. A configuration file holds only what differs.
#
# Each key is also a flag, `--diloco.inner-steps 50` or `--diloco-inner-steps 50`, and an environment variable,
# SHOAL_DILOCO__INNER_STEPS=50. Flags beat the environment, the environment beats the file.
# Written by `shoal config reference`.
"""


def _plain(value: object) -> Any:
    """Return a value as YAML and JSON know it."""
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in cast(list[object], value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast(dict[str, object], value).items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return None if isinstance(value, SecretStr) else str(value)


def public_values(config: Config) -> dict[str, Any]:
    """Return the configuration as nested JSON values without secrets (null): for logs, trackers and comparisons."""
    return cast(dict[str, Any], _plain(config))


def published_values(config: Config) -> dict[str, Any]:
    """Return `public_values` for those who are not of the swarm: without commands and arguments of the user's own
    programs, where people may have written an address with a token in it."""
    values = public_values(config)
    del values["notify"], values["data"]["arguments"]
    return values


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML with canonical names; loading it gives an equal one.

    Secrets are left out (null), so that the text can be printed and kept with the logs.
    """
    return yaml.safe_dump(public_values(config), sort_keys=False, allow_unicode=True, width=_WIDTH)


def config_to_json(config: Config) -> bytes:
    """Return the configuration with its secrets, to hand it to an own process over a pipe: `load.config_from_json`."""
    token = config.data.hf_token
    values = config.model_dump(mode="json")
    values["data"]["hf_token"] = None if token is None else token.get_secret_value()
    return json.dumps(values).encode()


def reference_yaml() -> str:
    """Return every key with its default and its description: the text of `configs/reference.yaml`."""
    return "\n".join([_REFERENCE_HEAD, *_section_lines(Config, Config(), "")]).rstrip() + "\n"


def key_lines() -> Iterator[str]:
    """Yield a flag with its default and its meaning for each key with a value, under the names of their sections."""
    for key in keys().values():
        default: object = key.info.default
        if section_of(key.info) is not None and isinstance(default, Section):
            yield f"\n{key.name}: {key.info.description}"
            continue
        shown = "" if default is None else f" [{default}]"
        yield f"  {flag_of(key.name)}{shown}  {key.info.description}"


def commented_yaml(said: Mapping[str, object], notes: Mapping[str, str]) -> str:
    """Return some keys as a file, in the order of the schema.

    Args:
        said: the value of each dotted key.
        notes: what stands as a comment above some of them.
    """
    lines: list[str] = []
    within: list[str] = []
    for name in keys():
        if name not in said:
            continue
        *sections, leaf = name.split(".")
        for depth, section in enumerate(sections):
            if within[: depth + 1] != sections[: depth + 1]:
                lines += [*([] if depth else [""]), f"{'  ' * depth}{section}:"]
        within, indent = sections, "  " * len(sections)
        if name in notes:
            lines += textwrap.wrap(notes[name], _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        value = said[name]
        items = cast(dict[str, object], value) if isinstance(value, dict) else {}
        lines.append(f"{indent}{leaf}:" if items else f"{indent}{leaf}: {_scalar(said[name])}")
        lines += [f"{indent}  {key}: {_scalar(item)}" for key, item in items.items()]
    return "\n".join(lines) + "\n"


def _section_lines(section: type[Section], values: Section, indent: str) -> Iterator[str]:
    for position, (name, info) in enumerate(section.model_fields.items()):
        value: object = getattr(values, name)
        inner = section_of(info)
        if not indent and (position == 0 or inner is not None):
            yield ""
        comment = f"{indent}# "
        yield from textwrap.wrap(info.description or "", _WIDTH, initial_indent=comment, subsequent_indent=comment)
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _section_lines(type(value), value, indent + "  ")
            continue
        yield f"{indent}{name}: {_scalar(value)}"
        item = item_section_of(info)
        if inner is not None:
            # Off by default: shown as a comment, ready to be uncommented.
            yield f"{indent}# {name}:"
            yield from _section_lines(inner, inner(), f"{indent}#   ")
        if item is not None:
            yield from _item_lines(item, f"{indent}#   ")


def _item_lines(item: type[Section], indent: str) -> Iterator[str]:
    yield f"{indent[:-2]}An item of this list:"
    for name, info in item.model_fields.items():
        default: object = info.default
        shown = "(required)" if default is PydanticUndefined else _scalar(default)
        yield from textwrap.wrap(
            f"{name}: {shown}  {info.description}", _WIDTH, initial_indent=indent, subsequent_indent=indent + "  "
        )


def _scalar(value: object) -> str:
    """Return a value on one line, as YAML."""
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").strip()
