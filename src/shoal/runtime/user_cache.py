"""Where a user's caches are: what may be deleted at any time, and is then made again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(name: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return `$XDG_CACHE_HOME/shoal/<name>` or `~/.cache/shoal/<name>`; it need not exist.

    Args:
        environment: this process's if None.
    """
    given = (os.environ if environment is None else environment).get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored (XDG Base Directory Specification).
    root = Path(given) if given.startswith("/") else Path("~/.cache").expanduser()
    return root / "shoal" / name
