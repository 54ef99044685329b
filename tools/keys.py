"""Prints docs/reference/keys.md from the schema: `python tools/keys.py > docs/reference/keys.md`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic_core import PydanticUndefined

from shoal.config.keys import ALIASES, Key, item_section_of, keys, section_of, walk

HEAD = """# Keys of the configuration

Every key with its default, made from `src/shoal/config/` by `tools/keys.py`; `configs/reference.yaml` has the same as a
file, and `shoal config keys` prints it.

A key is a line of a file, a flag, and a variable of the environment. Flags win over the environment, the environment
over the file, the file over the defaults. A wrong key is an error that names the nearest right one.

```bash
shoal config keys
shoal config show --diloco.inner-steps 50
shoal config show --diloco-inner-steps=50
SHOAL_DILOCO__INNER_STEPS=50 shoal config show
```
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *_sections()]) + "\n"


def _sections() -> Iterator[str]:
    by_section: dict[str, list[Key]] = defaultdict(list)
    for name, key in keys().items():
        if section_of(key.info) is None or item_section_of(key.info) is not None:
            by_section[name.rpartition(".")[0]].append(key)
        else:
            by_section[name] = []
    for section, held in by_section.items():
        if not held:
            continue
        yield f"## {section or 'At the top'}"
        yield ""
        if section:
            yield f"{keys()[section].info.description}"
            yield ""
        yield "| key | default | meaning |"
        yield "|---|---|---|"
        for key in held:
            yield f"| {_names(key.name)} | {_default(key)} | {_meaning(key)} |"
        for key in held:
            yield from _items(key)
        yield ""


def _names(name: str) -> str:
    others = [alias for alias, meant in ALIASES.items() if meant == name]
    return ", ".join(f"`{each}`" for each in (name, *others))


def _default(key: Key) -> str:
    default: Any = key.info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "needed"
    if default is None:
        return ""
    value = list(cast(tuple[Any, ...], default)) if isinstance(default, tuple) else default
    value = str(value) if isinstance(value, Path) else value
    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return f"`{text.strip().removesuffix('...').strip()}`" if text else "empty"


def _meaning(key: Key) -> str:
    return (key.info.description or "").replace("|", r"\|")


def _items(key: Key) -> Iterator[str]:
    """Yield a table of what an item of a list has."""
    section = item_section_of(key.info)
    if section is None:
        return
    yield ""
    yield f"An item of `{key.name}`:"
    yield ""
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for item in walk(section):
        yield f"| `{item.name}` | {_default(item)} | {_meaning(item)} |"


if __name__ == "__main__":
    print(page(), end="")
