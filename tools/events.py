"""Prints docs/events.md from the catalogue of events: `python tools/events.py > docs/events.md`."""

from __future__ import annotations

import importlib
from itertools import groupby

from shoal.events.base import Event, catalogue, level_name, name_of
from shoal.events.described import described

HEAD = """# Events

Everything that shoal logs, made from `src/shoal/events/` by `tools/events.py`; `shoal explain NAME` says the same of
one. A line of a log has the event's name, its level and its fields; WARNING and worse is what somebody may want to act
on. *Said* is what a person who watches the run is shown, with names of fields in braces; *Brief*, who reads later.
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
    said = described(kind)
    lines = [f"- **`{name_of(kind)}`** {level_name(kind.level)}: {said.happened}"]
    lines += [f"*{title}*: {text}" for title, text in said.parts]
    if said.fields:
        lines.append("Fields: " + ", ".join(f"`{name}`" for name in said.fields))
    return "  \n  ".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
