"""The numbers of a run for other programs."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.wandb_files import rows_of

from shoal.cli import main
from shoal.config import dump_config, load_config
from shoal.events.base import EVENTS_FILE
from shoal.monitor.exporters.metrics_file import MetricsFile, read_rows
from shoal.telemetry.rows import METRICS_FILE, MetricRow

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
PEER = "server 1@box2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose monitor was killed once, while it wrote."""
    folder = tmp_path / "logs" / "herd-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(load_config(None, ["--wandb-project=herd"], {})))
    told = {"level": "WARNING", "event": "server.lost", "says": "server 1@box2 is lost"}
    over = {"level": "INFO", "event": "incident.closed", "number": 1, "who": "server 1@box2", "cause": "frozen"}
    lines = [json.dumps({"time": BEGAN.isoformat(), **each}) for each in (told, over)]
    (folder / EVENTS_FILE).write_text("\n".join(lines) + "\nhalf a li")
    for start in range(2):
        file = MetricsFile(folder)
        for second in range(3):
            number = 3 * start + second
            values = {"samples": 8.0 * number, "loss/train": 5.0 - number}
            peers = {PEER: {"step.committed": float(number)}}
            file.row(MetricRow(BEGAN + timedelta(seconds=number), values, peers))
        file.close(1.0)
        with (folder / METRICS_FILE).open("a") as half:
            half.write('{"time": "2026\n')
    return folder


def _export(run: Path, *flags: str) -> int:
    return main(["runs", "export", "herd", "--log-dir", str(run.parent), *flags])


def test_what_was_being_written_when_the_monitor_was_killed_is_left_out(run: Path) -> None:
    assert [row.run["loss/train"] for row in read_rows(run) if row.run] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_csv_has_a_row_a_second_of_the_run_and_a_row_a_number_of_the_peers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _export(run, "--to", "csv") == 0
    of_run, of_peers = map(Path, capsys.readouterr().out.split())
    with of_run.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss/train"]) for row in rows] == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert rows[0]["time"] == "2026-01-01T00:00:00+00:00"
    with of_peers.open() as file:
        peers = list(csv.DictReader(file))
    assert [(row["who"], row["number"], float(row["value"])) for row in peers] == [
        (PEER, "step.committed", 2.0),
        (PEER, "step.committed", 5.0),
    ]


def test_tensorboards_steps_are_samples(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    assert _export(run, "--to", "tensorboard", "--output", str(tmp_path / "board")) == 0
    [file] = (tmp_path / "board").iterdir()
    raw, found = file.read_bytes(), list[tuple[int, float]]()
    while raw:  # a record: its length in 8 bytes, 4 of a checksum, itself, 4 of a checksum
        length = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + length])
        found += [(event.step, each.simple_value) for each in event.summary.value if each.tag == "loss/train"]
        raw = raw[16 + length :]
    assert found == [(8 * number, 5.0 - number) for number in range(6)]


def _table(part: Path, name: str) -> dict[str, Any]:
    [path] = part.glob(f"files/media/table/{name}_*.table.json")
    content = json.loads(path.read_text())
    return {"columns": content["columns"], "data": content["data"]}


@pytest.mark.slow
def test_wandb_gets_one_run_whatever_the_monitor_has_lived_through(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    assert _export(run, "--to", "wandb") == 0
    assert "wandb sync" in capsys.readouterr().out
    [part] = (run / "exported-wandb").glob("wandb/offline-run-*-herd-1")
    *rows, of_events = rows_of(part)
    assert any(name.startswith("events") for name in of_events)
    losses = [row["loss/train"] for row in rows]
    assert [row["_step"] for row in rows] == list(range(6))
    assert rows[3][f"{PEER}/step.committed"] == 2.0
    assert [each[2:] for each in _table(part, "events")["data"]] == [["server.lost", "server 1@box2 is lost"]]
    [incident] = _table(part, "incidents")["data"]
    named = dict(zip(_table(part, "incidents")["columns"], incident, strict=True))
    assert (named["number"], named["who"], named["cause"], named["steps_lost"]) == (1, "server 1@box2", "frozen", None)
    assert _table(part, "peers") == {"columns": ["peer", "step.committed"], "data": [[PEER, 5.0]]}
    assert losses == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def test_a_run_s_own_folder_leads_to_no_other_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (run / "exported-csv").symlink_to(tmp_path / "mine")
    assert _export(run, "--to", "csv") == 2
    assert "exported-csv is a link" in capsys.readouterr().err
    assert not any((tmp_path / "mine").iterdir())


def test_a_folder_that_has_something_a_run_without_numbers_and_no_run_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _export(run, "--to", "csv") == 0
    assert _export(run, "--to", "csv") == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["runs", "export", "--to", "csv", "--log-dir", str(tmp_path / "none")]) == 2
    assert "it is on the host of the run's client" in capsys.readouterr().err
