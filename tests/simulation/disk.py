"""The disk of one host: what was written survives a process, and only what was synced survives the machine."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Disk:
    """Keys and values; a crash of the machine takes back what was not synced."""

    def __init__(self) -> None:
        self._cached: dict[Hashable, Any] = {}
        self._synced: dict[Hashable, Any] = {}

    def write(self, key: Hashable, value: Any) -> None:
        """Write; the page cache has it."""
        self._cached[key] = value

    def sync(self) -> None:
        """All that was written is on the disk."""
        self._synced = dict(self._cached)

    def read(self, key: Hashable, default: Any = None) -> Any:
        """What a process of this machine reads."""
        return self._cached.get(key, default)

    def lose_power(self) -> None:
        """The machine dies: what was not synced is gone."""
        self._cached = dict(self._synced)
