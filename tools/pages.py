"""Writes every page of docs/ that is made from the code: `python tools/pages.py`, or `make pages`.

Tests compare each page with what its tool says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools import commands, distqat, events, files, json_forms, keys, metrics, wrong  # noqa: E402

PAGES: dict[str, Callable[[], str]] = {
    "docs/events.md": events.page,
    "docs/metrics.md": metrics.page,
    "docs/reference/commands.md": commands.page,
    "docs/reference/distqat.md": distqat.page,
    "docs/reference/files.md": files.page,
    "docs/reference/keys.md": keys.page,
    "docs/reference/status.md": json_forms.page,
    "docs/wrong.md": wrong.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page())
