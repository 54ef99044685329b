"""`metrics.jsonl`: the numbers of a run in its folder, a row a line, of bounded size.

Everything that looks at a run afterwards is made of this file and of `events.jsonl`. Numbers of peers are written less
often than they come: of a hundred servers they would fill the file in an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from shoal.log import LinesFile, written_lines
from shoal.monitor.exporters.base import NotedEvent
from shoal.telemetry.rows import METRICS_FILE, MetricRow

MAX_FILE_BYTES = 64 * 2**20
_PEERS_INTERVAL_S = 10.0


_decode = msgspec.json.Decoder(MetricRow).decode


def read_rows(log_dir: Path) -> Iterator[MetricRow]:
    """Yield the rows of the run in this folder, in order.

    Raises:
        OSError: they cannot be read.
    """
    for line in written_lines(log_dir / METRICS_FILE):
        try:
            yield _decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # whoever wrote it was killed meanwhile, or it is of another version


class MetricsFile:
    """Writes the file."""

    def __init__(self, log_dir: Path) -> None:
        """Prepare; the file is made for the first row, and what an earlier start has written stays."""
        self._file = LinesFile(log_dir / METRICS_FILE, max_bytes=MAX_FILE_BYTES)
        self._peers: dict[str, dict[str, float]] = {}
        self._time: datetime | None = None
        self._peers_time: datetime | None = None

    def row(self, row: MetricRow) -> None:
        """Write the numbers of the run at once, and those of the peers every few seconds."""
        for peer, values in row.peers.items():
            self._peers[peer] = self._peers.get(peer, {}) | values
        self._time = row.time
        if self._peers_time is None:
            self._peers_time = row.time
        # Also if the clock was set back.
        if abs((row.time - self._peers_time).total_seconds()) >= _PEERS_INTERVAL_S:
            self._write_with_peers(row)
        elif row.run:
            self._write(MetricRow(row.time, row.run))

    def event(self, event: NotedEvent) -> None:
        """The client has written it into `events.jsonl`."""

    def close(self, timeout_s: float) -> bool:
        """Write what peers have said since the last time."""
        if self._peers and self._time is not None:
            self._write_with_peers(MetricRow(self._time, {}))
        self._file.close()
        return True

    def _write_with_peers(self, row: MetricRow) -> None:
        self._write(MetricRow(row.time, row.run, self._peers))
        self._peers, self._peers_time = {}, row.time

    def _write(self, row: MetricRow) -> None:
        self._file.write(msgspec.json.encode(row).decode())
