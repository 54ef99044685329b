"""Prints docs/events.md from the catalogue of events: `python tools/events.py > docs/events.md`."""

from __future__ import annotations

import importlib
import inspect
from itertools import groupby
from typing import Any, cast, get_args, get_origin, get_type_hints

from shoal.events.base import Event, catalogue, field_names, level_name

HEAD = """# Events

Everything that shoal logs, made from `src/shoal/events/` by `tools/events.py`. A line of a log has the event's name,
its level and its fields; WARNING and worse is what somebody may want to act on. *Said* is what a person who watches the
run is shown, with names of fields in braces.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    by_module = sorted(catalogue().values(), key=lambda kind: kind.__module__)
    for module, kinds in groupby(by_module, key=lambda kind: kind.__module__):
        parts.append(f"## {module.rpartition('.')[2]}\n\n{importlib.import_module(module).__doc__}\n")
        parts += [entry(kind) for kind in kinds]
    return "\n".join(parts)


def entry(kind: type[Event]) -> str:
    """Return what the page says of one kind."""
    event = sample(kind)
    happened = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    lines = [f"- **`{event.name}`** {level_name(kind.level)}: {happened}"]
    lines += [
        f"*{title}*: {text}" for title, text in (("Said", event.say()), ("Why", kind.why), ("Do", kind.do)) if text
    ]
    if names := field_names(kind).values():
        lines.append("Fields: " + ", ".join(f"`{name}`" for name in names))
    return "  \n  ".join(lines) + "\n"


class _Number(int):
    """A number that shows the name of its field, however it is formatted."""

    field = ""

    def __str__(self) -> str:
        return f"{{{self.field}}}"

    def __format__(self, spec: str) -> str:
        return str(self)


class _Text(str):
    """The name of a field, of which each part shows the whole."""

    def __getitem__(self, key: Any) -> str:
        return self


def sample(kind: type[Event]) -> Event:
    """Return an event whose values are the names of its fields."""
    hints = get_type_hints(kind)
    return kind(**{field: _value(name, hints[field]) for field, name in field_names(kind).items()})


def _value(name: str, hint: Any) -> Any:
    origin = get_origin(hint) or hint
    if origin in (tuple, list, set, frozenset):
        return cast(Any, origin)([_value(name, get_args(hint)[0])])
    if isinstance(origin, type) and issubclass(origin, dict):
        return {}
    if hint in (int, float):
        number = _Number(1)
        number.field = name
        return number
    return hint is bool or _Text(f"{{{name}}}")


if __name__ == "__main__":
    print(page(), end="")
