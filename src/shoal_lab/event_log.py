"""A log file of a process as others read it: further with each look, while it is written and renamed."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass
class EventLog:
    """One log file, read further with each call; an incomplete last line is left for the next one.

    A file that has become too long is renamed by its process, which goes on in a new one: the rest of it comes first.
    Several threads may read it.
    """

    path: Path
    _events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _offset: int = 0
    _inode: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> list[dict[str, Any]]:
        """Return all events so far; none while there is no such file."""
        with self._lock:
            if self.path.exists():
                inode = self.path.stat().st_ino
                if self._inode and inode != self._inode:
                    older = self.path.with_name(f"{self.path.name}.1")
                    if older.exists() and older.stat().st_ino == self._inode:
                        self._read(older)
                    self._offset = 0
                self._inode = inode
                self._read(self.path)
            return self._events

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this name so far."""
        return [event for event in self.read() if event["event"] == name]

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._offset += len(whole) + 1
            self._events += map(json.loads, whole.splitlines())


def logged_below(log_root: Path, pattern: str = "*.log") -> list[dict[str, Any]]:
    """Return what the logs of the runs in a folder hold up to now, oldest first; a last line may be half written."""
    paths = [path for path in log_root.glob(f"*/{pattern}") if not path.parent.is_symlink()]
    lines = [line for path in paths for line in path.read_text().rpartition("\n")[0].splitlines()]
    return sorted(map(json.loads, lines), key=lambda event: event["time"])


def time_of(event: dict[str, Any]) -> float:
    """Return when an event was logged, in seconds of the wall clock."""
    return datetime.fromisoformat(event["time"]).timestamp()
