"""Folders, files and patterns that the configuration names as data: whether they are on this host.

Reads no file, and imports nothing that takes long: a launcher asks before it starts anything.
"""

from __future__ import annotations

import glob
from pathlib import Path

from shoal.config.training import DataConfig
from shoal.errors import ConfigError


def is_place(name: str) -> bool:
    """Whether this says where a folder or files lie: no name on the hub looks like this."""
    return name.startswith((".", "/", "~")) or glob.has_magic(name)


def require_here(data: DataConfig) -> None:
    """Refuse data that can be on this host alone, and is not: nobody waits for a swarm or a network to hear that.

    Raises:
        ConfigError: there is no such folder or file.
    """
    if not data.is_own and is_place(data.dataset_name):
        _require("dataset_name", data.dataset_name)
    if data.eval_split is not None and "/" in data.eval_split:
        _require("eval_split", data.eval_split)


def place_meant(split: str) -> str:
    """Return what to say of a split that is not there: that a file or folder of its name is, where one is."""
    return f"; the file or folder of that name is ./{split}" if "/" not in split and Path(split).exists() else ""


def _require(key: str, name: str) -> None:
    path = Path(name).expanduser()
    if path.exists() or (glob.has_magic(name) and next(glob.iglob(str(path), recursive=True), None) is not None):
        return
    raise ConfigError(f"data.{key} = {name}: there is no such folder or file here ({path.absolute()})")
