"""What a page knows of a run, from the files in the run's folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from shoal.monitor.exporters.base import read_noted
from shoal.monitor.exporters.metrics_file import read_rows
from shoal.monitor.page.chronicle import Chronicle

_LAST_LINES: Final = 200


def read_chronicle(log_dir: Path, info: Mapping[str, Any]) -> tuple[Chronicle, frozenset[bytes]]:
    """Return what the run in this folder has left, and the last lines of `events.jsonl`, which it contains.

    Raises:
        OSError: its files cannot be read.
    """
    chronicle = Chronicle(info)
    for row in read_rows(log_dir):
        chronicle.row(row)
    last = deque[bytes](maxlen=_LAST_LINES)
    for event in read_noted(log_dir):
        chronicle.event(event)
        last.append(event.line)
    return chronicle, frozenset(last)
