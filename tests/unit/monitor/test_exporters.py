"""Where a monitor exports to, and which W&B run that is."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import Config, config_to_json, load_config
from shoal.control.role_start import MonitorSpec
from shoal.ids import PeerId
from shoal.monitor import service
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.exporters.notify import NotifyCommand
from shoal.monitor.exporters.wandb_run import WandbRun, WandbSettings
from shoal.telemetry.rows import MetricRow


class FakeWandb:
    """W&B as a module, as far as a run needs it; keeps with what a run was made."""

    Error = errors = SimpleNamespace(UsageError=ZeroDivisionError, CommError=ZeroDivisionError)
    Settings = SimpleNamespace

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.run = SimpleNamespace(
            step=0,
            settings=SimpleNamespace(mode="shared"),
            define_metric=lambda *_, **__: None,
            log=lambda *_, **__: None,
            finish=lambda: None,
        )

    def init(self, **given: Any) -> SimpleNamespace:
        self.given = given
        return self.run

    def teardown(self) -> None:
        pass


def _start(config: Config, log_dir: Path) -> MonitorSpec:
    return MonitorSpec(
        run_id="run-1",
        role="monitor",
        index=0,
        config_json=config_to_json(config),
        identity_key=b"",
        swarm_key=b"",
        socket_path="",
        log_dir=str(log_dir),
        client=PeerId("client"),
    )


async def test_the_run_belongs_to_the_configured_entity_and_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", api)
    config = load_config(None, {"wandb_entity": "team", "wandb_project": "herd", "wandb_run_id": "again"}, {})
    start = _start(config, tmp_path)
    run = service._wandb_run(start, config, SimpleNamespace(event=lambda *_, **__: None))  # type: ignore[arg-type]
    assert run is not None
    run.row(MetricRow(datetime.now(UTC), {"loss/train": 1.0}))
    assert run.close(60.0)
    assert {name: api.given[name] for name in ("entity", "project", "id")} == {
        "entity": "team",
        "project": "herd",
        "id": "again",
    }


async def test_numbers_go_where_the_configuration_says(tmp_path: Path) -> None:
    control: Any = SimpleNamespace(event=lambda *_, **__: None)
    program = ("/usr/local/bin/tell", "--channel", "herd")
    for wandb, command, expected in (
        (False, (), [MetricsFile]),
        (True, (), [MetricsFile, WandbRun]),
        (False, program, [MetricsFile, NotifyCommand]),
    ):
        config = load_config(None, {"wandb": wandb, "notify": {"command": command}}, {})
        exporters = service._exporters(_start(config, tmp_path), config, control)
        assert [type(each) for each in exporters] == expected
    assert load_config(None, ["--notify.command=tell --channel herd"], {}).notify.command == ("tell", *program[1:])


@pytest.mark.parametrize("fails", [False, True])
async def test_where_a_run_of_wandb_is_and_that_it_has_stopped_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def log(*_: object, **__: object) -> None:
        if fails:
            raise OSError("no space left\nand more")

    api = FakeWandb()
    api.Error = ZeroDivisionError  # type: ignore[assignment]
    api.run.settings, api.run.url, api.run.log = SimpleNamespace(mode="online"), "https://there/run-1", log
    monkeypatch.setitem(sys.modules, "wandb", api)
    notices: list[str] = []
    run = WandbRun(WandbSettings("run", tmp_path, {}, "run-1"), notices.append)
    assert run.write([{"loss/train": 1.0}]) is not fails
    assert "https://there/run-1" in notices[0]
    assert "no space left" in notices[-1] if fails else notices[1:] == []
