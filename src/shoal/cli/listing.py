"""`shoal config keys`: every flag with its default and its meaning, for reading and for grep."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.base import Section
from shoal.config.flags import flag_of
from shoal.config.keys import keys, section_of


def key_lines() -> Iterator[str]:
    """Yield one line for each key that holds a value, under the names of their sections."""
    for key in keys().values():
        default: object = key.info.default
        if section_of(key.info) is not None and isinstance(default, Section):
            yield f"\n{key.name}: {key.info.description}"
            continue
        shown = "" if default is None else f" [{default}]"
        yield f"  {flag_of(key.name)}{shown}  {key.info.description}"
