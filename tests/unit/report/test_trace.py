"""The course of a run for Perfetto."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.monitor.exporters.base import NotedEvent, noted_event
from shoal.report.trace import trace_of
from shoal.telemetry.rows import MetricRow

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def _noted(second: float, event: str, level: str = "INFO", **values: object) -> NotedEvent:
    at = (BEGAN + timedelta(seconds=second)).isoformat()
    return noted_event(json.dumps({"time": at, "level": level, "event": event, **values}).encode())


def _recorded(second: float, **values: object) -> NotedEvent:
    whole = {"loss": 1.0, "hashes": {}, "trained": True, "sent_bytes": {}}
    return _noted(second, "round.recorded", **whole | values)


LINES = (
    _noted(1, "server.lost", "WARNING", says="server 1@box2 is lost"),
    _noted(2, "data.sized"),
    _recorded(5, round=1, duration_s=5.0, averaging_s=1.5),
    _recorded(9, round=2, duration_s=3.0),
    _recorded(10, round=3, duration_s=None),
)
ROW = MetricRow(BEGAN + timedelta(seconds=4), {"samples_per_s": 7.0, "lr": 1.0}, {"server 0@box1": {"busy": 0.5}})


def _by_phase(trace: bytes) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(trace)["traceEvents"]:
        found.setdefault(each["ph"], []).append(each)
    return found


def test_rounds_with_their_phases_events_and_numbers_are_on_one_axis_of_time() -> None:
    found = _by_phase(trace_of(LINES, [ROW]))
    spans = {(each["name"], each["ts"], each["dur"]) for each in found["X"]}
    assert spans == {
        ("round 1", 0.0, 5e6),
        ("train", 0.0, 3.5e6),
        ("average", 3.5e6, 1.5e6),
        ("round 2", 6e6, 3e6),
    }
    [event] = found["i"]
    assert (event["name"], event["ts"], event["args"]["says"]) == ("server.lost", 1e6, "server 1@box2 is lost")
    assert {(each["name"], each["ts"], each["args"]["value"]) for each in found["C"]} == {
        ("samples_per_s", 4e6, 7.0),
        ("server 0@box1 busy", 4e6, 0.5),
    }


def test_of_a_run_without_anything_the_trace_is_empty() -> None:
    assert json.loads(trace_of([], []))["traceEvents"] == []


def test_the_command_writes_it_into_the_folder_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "herd-1"
    folder.mkdir()
    line = _recorded(2, round=1, duration_s=2.0).line
    (folder / "events.jsonl").write_bytes(line + b"\nhalf a li")
    assert main(["trace", "herd", "--log-dir", str(tmp_path)]) == 0
    [path] = map(Path, capsys.readouterr().out.splitlines()[:1])
    assert [each["name"] for each in _by_phase(path.read_bytes())["X"]] == ["round 1"]
    assert main(["trace", "herd", "--log-dir", str(tmp_path), "--output", str(tmp_path / "none" / "a.json")]) == 2
    (tmp_path / "mine").write_text("mine")
    (folder / "trace.json").unlink()
    (folder / "trace.json").symlink_to(tmp_path / "mine")
    assert main(["trace", "herd", "--log-dir", str(tmp_path)]) == 0
    assert (tmp_path / "mine").read_text() == "mine", "who has made the folder of a run overwrites no other file"
    assert json.loads((folder / "trace.json").read_text())
    assert "cannot use" in capsys.readouterr().err
