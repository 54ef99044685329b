"""Where a user's caches are: what may be deleted at any time, and is then made again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from shoal.runtime.durable_files import put_whole


def user_cache(name: str, environment: Mapping[str, str] | None = None) -> Path:
    """Return `$XDG_CACHE_HOME/shoal/<name>` or `~/.cache/shoal/<name>`; it need not exist.

    Args:
        environment: this process's if None.
    """
    given = (os.environ if environment is None else environment).get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored (XDG Base Directory Specification).
    root = Path(given) if given.startswith("/") else Path("~/.cache").expanduser()
    return root / "shoal" / name


def cached_file(folder: Path, key: str) -> Path:
    """Return the file of a cache that stands for a key, whatever characters the key has."""
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def keep(path: Path, content: bytes) -> None:
    """Write a file of a cache, whole or not at all; its folder is made with it.

    Raises:
        OSError: That is not possible; nothing is left of the attempt.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    put_whole(path, content, lasting=False, private=True)
