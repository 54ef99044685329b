"""The numbers of a run in its folder, a row a line: `metrics.jsonl` those of the run, `peers.jsonl` those of the peers.

Everything that looks at a run afterwards is made of these files and of `events.jsonl`. Each is of bounded size, so
numbers of hundreds of servers, also written less often than they come, do not drive out those of the run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from shoal.errors import MALFORMED
from shoal.log import LinesFile, written_lines
from shoal.monitor.exporters.base import NotedEvent
from shoal.telemetry.rows import METRICS_FILE, PEERS_FILE, MetricRow

MAX_FILE_BYTES = 64 * 2**20
_PEERS_INTERVAL_S = 10.0


_decode = msgspec.json.Decoder(MetricRow).decode


def read_rows(log_dir: Path) -> Iterator[MetricRow]:
    """Yield the rows of the run in this folder, and those of its peers, in order of time.

    Raises:
        OSError: they cannot be read.
    """
    return heapq.merge(*(_read(log_dir / name) for name in (METRICS_FILE, PEERS_FILE)), key=lambda row: row.time)


def _read(path: Path) -> Iterator[MetricRow]:
    for line in written_lines(path):
        try:
            yield _decode(line)
        except MALFORMED:
            continue  # whoever wrote it was killed meanwhile, or it is of another version


class MetricsFile:
    """Writes both files."""

    def __init__(self, log_dir: Path) -> None:
        """Prepare; a file is made for its first row, and what an earlier start has written stays."""
        self._of_run, self._of_peers = (
            LinesFile(log_dir / name, max_bytes=MAX_FILE_BYTES) for name in (METRICS_FILE, PEERS_FILE)
        )
        self._peers: dict[str, dict[str, float]] = {}
        self._time: datetime | None = None
        self._peers_time: datetime | None = None

    def row(self, row: MetricRow) -> None:
        """Write the numbers of the run at once, and those of the peers every few seconds."""
        for peer, values in row.peers.items():
            self._peers[peer] = self._peers.get(peer, {}) | values
        if row.run:
            _write(self._of_run, MetricRow(row.time, row.run))
        self._time = row.time
        if self._peers_time is None:
            self._peers_time = row.time
        # Also if the clock was set back.
        if abs((row.time - self._peers_time).total_seconds()) >= _PEERS_INTERVAL_S:
            self._write_peers(row.time)

    def event(self, event: NotedEvent) -> None:
        """The client has written it into `events.jsonl`."""

    def close(self, timeout_s: float) -> bool:
        """Write what peers have said since the last time."""
        if self._time is not None:
            self._write_peers(self._time)
        self._of_run.close()
        self._of_peers.close()
        return True

    def _write_peers(self, time: datetime) -> None:
        if self._peers:
            _write(self._of_peers, MetricRow(time, {}, self._peers))
        self._peers, self._peers_time = {}, time


def _write(file: LinesFile, row: MetricRow) -> None:
    file.write(msgspec.json.encode(row).decode())
