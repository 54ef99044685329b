"""Prints docs/reference/distqat.md from the names: `python tools/distqat.py > docs/reference/distqat.md`."""

from __future__ import annotations

from itertools import groupby

from shoal.config.distqat import OTHER_DEFAULTS
from shoal.config.distqat_names import REMOVED
from shoal.config.keys import ALIASES

HEAD = """# Keys of DistQat

What becomes of a key of DistQat (aether), made from `src/shoal/config/distqat_names.py` by `tools/distqat.py`. A key
that is not here has the same name in shoal. `shoal config convert` translates a file, and says the same in comments:

```bash
shoal config convert aether.yaml > mine.yaml
```

## Another name

The old name works too.

| DistQat | shoal |
|---|---|"""
DEFAULTS = """
## Another default

Where a file says nothing, DistQat and shoal do not do the same; `shoal config convert` writes these values down.

| key | DistQat |
|---|---|"""
NONE = """
## No key

In a file that is given for a run such a key is an error, with the reason; `shoal config convert` leaves it out.

| DistQat | why not |
|---|---|"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, *(f"| `{there}` | `{here}` |" for there, here in ALIASES.items() if "." in there)]
    lines += [DEFAULTS, *(f"| `{name}` | `{_shown(value)}` |" for name, value in OTHER_DEFAULTS.items())]
    lines.append(NONE)
    for reason, keys in groupby(REMOVED, key=REMOVED.__getitem__):
        lines.append(f"| {', '.join(f'`{key}`' for key in keys)} | {reason} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    return "null" if value is None else str(value)


if __name__ == "__main__":
    print(page(), end="")
