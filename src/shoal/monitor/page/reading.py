"""What a page knows of a run, from the files in the run's folder."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.events.base import EVENTS_FILE
from shoal.log import written_lines
from shoal.monitor.exporters.base import noted_event
from shoal.monitor.page.chronicle import Chronicle
from shoal.telemetry.rows import METRICS_FILE, MetricRow

_LAST_LINES: Final = 200


def read_chronicle(log_dir: Path, info: Mapping[str, Any]) -> tuple[Chronicle, frozenset[bytes]]:
    """Return what the run in this folder has left, and the last lines of `events.jsonl`, which it contains.

    Raises:
        OSError: its files cannot be read.
    """
    chronicle = Chronicle(info)
    rows = msgspec.json.Decoder(MetricRow)
    for line in written_lines(log_dir / METRICS_FILE):
        try:
            chronicle.row(rows.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # whoever wrote it was killed meanwhile
    last = deque[bytes](maxlen=_LAST_LINES)
    for line in written_lines(log_dir / EVENTS_FILE):
        try:
            chronicle.event(noted_event(line.rstrip(b"\n")))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        last.append(line.rstrip(b"\n"))
    return chronicle, frozenset(last)
