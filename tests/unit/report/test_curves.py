"""The picture that a run leaves in its folder."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.cli.local import HostRun
from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.events.hosts import CurvesNotDrawn, ReportNotWritten
from shoal.events.run import LossPart, RoundRecorded
from shoal.ids import RunId
from shoal.report import page
from shoal.report.curves import FILE_NAME, write_curves
from shoal.report.page import write_page
from shoal.telemetry.rows import METRICS_FILE


def trained(folder: Path) -> None:
    ledger = Ledger(SystemClock(), log_dir=folder)
    ledger.note(RoundRecorded(1, 5.0, {}, True, {}, 3725.0, 0, (LossPart(8, 4.0, 5.0, 6.0),)))
    ledger.close()


def test_it_names_model_data_run_and_time(tmp_path: Path) -> None:
    trained(tmp_path)
    config = Config.model_validate({"data": {"dataset_name": "/home/ann/books"}, "model_pipeline": {"stages": 2}})
    path = write_curves(tmp_path, config, RunId("mine-1"))
    assert path == tmp_path / FILE_NAME
    picture = path.read_text()
    assert "gpt on books" in picture
    assert "/home" not in picture
    assert "mine-1, 2 stages, 1 round in 1:02:05" in picture


@pytest.mark.parametrize(
    ("task", "family", "unit"),
    [
        ("llm", "gpt", "nats per token"),
        ("cv", "mlp", "nats per image"),
        ("speech", "wav2vec2", "nats per character"),
        ("image_gen", "biggan", "of both players per image"),
    ],
)
def test_it_says_what_a_loss_is_of(tmp_path: Path, task: str, family: str, unit: str) -> None:
    trained(tmp_path)
    values = {"data": {"task_type": task, "dataset_name": "/home/ann/mine"}, "model": {"family": family}}
    path = write_curves(tmp_path, Config.model_validate(values), RunId("mine-1"))
    assert path is not None
    assert f"loss, {unit}" in path.read_text()


def test_a_run_that_has_trained_nothing_leaves_none(tmp_path: Path) -> None:
    assert write_curves(tmp_path, Config(), RunId("mine-1")) is None
    assert not list(tmp_path.iterdir())


async def test_a_picture_that_cannot_be_written_is_named_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="shoal")
    trained(tmp_path)
    (tmp_path / FILE_NAME).mkdir()
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    assert host._written(write_curves, CurvesNotDrawn) is None
    assert [record.getMessage() for record in caplog.records] == ["curves.not_drawn"]


async def test_a_report_that_is_made_with_files_of_another_version_is_named_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="shoal")
    trained(tmp_path)
    (tmp_path / "index.html").write_text("<html></html>")
    monkeypatch.setattr(page, "PAGE", tmp_path / "index.html")
    chronicle = SimpleNamespace(last_s=1.0, past=lambda *_, **__: {})
    monkeypatch.setattr(page, "read_chronicle", lambda *_: (chronicle, frozenset()))
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    assert host._written(write_page, ReportNotWritten) is None
    assert [record.getMessage() for record in caplog.records] == ["report.not_written"]


async def test_a_report_of_what_cannot_be_read_is_named_and_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="shoal")
    (tmp_path / METRICS_FILE).mkdir()
    host = HostRun(Config(), RunId("mine-1"), tmp_path, SystemClock(), b"")
    assert host._written(write_page, ReportNotWritten) is None
    assert [record.getMessage() for record in caplog.records] == ["report.not_written"]
