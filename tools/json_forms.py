"""Prints docs/reference/status.md from the types: `python tools/json_forms.py > docs/reference/status.md`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.cli.doctor.diagnosis import Diagnosis
from shoal.control.swarm_status import SwarmStatus

HEAD = """# Status and doctor, for programs

What `shoal status --json` and `shoal doctor --json` print, made from the types by `tools/json_forms.py`. Keys are
added, none is taken away, and `schema` goes up where a meaning changes. The files are for validators:
[status.schema.json](../status.schema.json) and [doctor.schema.json](../doctor.schema.json).

```bash
shoal status --json
shoal status --watch --json        # an object a second
shoal doctor --json
```
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for command, kind in (("shoal status --json", SwarmStatus), ("shoal doctor --json", Diagnosis)):
        lines += [f"## `{command}`", ""]
        forms: dict[str, dict[str, Any]] = msgspec.json.schema(kind)["$defs"]
        for name, form in forms.items():
            lines += [*_entry(name, form), ""]
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, form: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield inspect.cleandoc(form["description"])
    yield ""
    if "enum" in form:
        yield "One of " + ", ".join(f"`{value}`" for value in form["enum"]) + "."
        return
    yield "| key | type | if it is left out |"
    yield "|---|---|---|"
    for key, value in form["properties"].items():
        yield f"| `{key}` | {_type(value)} | {_default(value)} |"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(_type(each) for each in value["anyOf"])
    if value["type"] == "array":
        return f"list of {_type(value['items'])}"
    return str(value["type"])


def _default(value: dict[str, Any]) -> str:
    return f"`{msgspec.json.encode(value['default']).decode()}`" if "default" in value else ""


if __name__ == "__main__":
    print(page(), end="")
