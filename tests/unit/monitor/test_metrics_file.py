"""`metrics.jsonl` and `peers.jsonl`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from shoal.log import written_lines
from shoal.monitor.exporters.metrics_file import MetricsFile, read_rows
from shoal.telemetry.rows import METRICS_FILE, PEERS_FILE, MetricRow

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def _written(folder: Path, name: str = METRICS_FILE) -> list[MetricRow]:
    return [msgspec.json.decode(line, type=MetricRow) for line in written_lines(folder / name)]


def test_rows_of_the_run_are_written_at_once_and_peers_together_every_few_seconds(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for second in range(12):
        file.row(
            MetricRow(
                BEGAN + timedelta(seconds=second), {"step": float(second)}, {"server 0": {"samples": float(second)}}
            )
        )
    of_peers = [
        MetricRow(BEGAN + timedelta(seconds=second), {}, {"server 0": {"samples": second}}) for second in (10, 11)
    ]
    assert [row.run["step"] for row in _written(tmp_path)] == [float(second) for second in range(12)]
    assert _written(tmp_path, PEERS_FILE) == of_peers[:1]
    assert file.close(1.0)
    assert _written(tmp_path, PEERS_FILE) == of_peers
    assert list(read_rows(tmp_path)) == [*_written(tmp_path)[:11], of_peers[0], *_written(tmp_path)[11:], of_peers[1]]


def test_another_start_goes_on_with_the_same_file(tmp_path: Path) -> None:
    for start in range(2):
        file = MetricsFile(tmp_path)
        file.row(MetricRow(BEGAN, {"step": float(start)}))
        file.close(1.0)
    assert [row.run["step"] for row in _written(tmp_path)] == [0.0, 1.0]
    assert MetricsFile(tmp_path).close(1.0)
