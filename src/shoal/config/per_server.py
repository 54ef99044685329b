"""Values of a host's servers: one for all, or a list with one for each.

`--servers.threads 2`, `--servers.threads 1,2`, `--servers.threads 1 --servers.threads 2` and the YAML list `[1, 2]` are
ways to say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

_Value = TypeVar("_Value")


def split_values(value: object) -> object:
    """Return a list of what users give as one value, a list, or text with commas; the schema checks its items."""
    if isinstance(value, str):
        return [part.strip() for part in value.strip().removeprefix("[").removesuffix("]").split(",")]
    if isinstance(value, list | tuple):
        flat: list[object] = []
        for item in cast("list[object]", value):
            flat += cast("list[object]", split_values(item)) if isinstance(item, str) else [item]
        return flat
    return [value]


def of_server(values: Sequence[_Value], index: int) -> _Value:
    """Return the value of server `index`: the only one there is, or its own."""
    return values[0] if len(values) == 1 else values[index]


def length_problem(key: str, values: Sequence[object], num_servers: int) -> str | None:
    """Return why these are not values of so many servers, or None."""
    if len(values) in (1, num_servers):
        return None
    given = ",".join(map(str, values))
    servers = "1 server" if num_servers == 1 else f"{num_servers} servers"
    return (
        f"{key} = {given} has {len(values)} values, and this host has {servers}: give one value for all of them, or "
        "one for each"
    )
