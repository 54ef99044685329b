"""What others have said moves no cursor of a terminal, whichever command shows it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shoal.cli import replay, told_events
from shoal.cli.display import print_event, screen
from shoal.cli.live import LiveView
from shoal.cli.output import plain_json
from shoal.cli.run_row import Cell
from shoal.config import load_config
from shoal.control.swarm_status import EventStatus
from shoal.events.run import RunStopped
from shoal.replay.verdict import Difference, Verdict

pytestmark = pytest.mark.anyio

EVIL = "a\x1b[2Jb\x07c\x9b"
MOVING = ("\x1b[2J", "\x07", "\x9b")


def _moves(text: str) -> bool:
    return any(each in text for each in MOVING)


def test_why_a_run_has_failed(tmp_path: Path) -> None:
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=100)
    view = LiveView(load_config(), "run-1", tmp_path, console=console)
    view.failed(EVIL)
    view.__exit__()
    assert "failed: a" in terminal.getvalue()
    assert not _moves(terminal.getvalue())


def test_what_a_live_row_says(capsys: pytest.CaptureFixture[str]) -> None:
    row: Any = SimpleNamespace(cells=lambda _: [Cell("step", "1")], state=lambda _: EVIL)
    terminal = io.StringIO()
    Console(file=terminal, force_terminal=True, width=100).print(screen(row, 0.0, 100))
    assert not _moves(terminal.getvalue())
    print_event(RunStopped(EVIL))
    assert not _moves(capsys.readouterr().out)


async def test_how_the_run_of_another_host_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class _Ended:
        status, ended, on_news = None, f"run 1 has failed: {EVIL}", None

        def __init__(self, *_: object) -> None:
            pass

        async def run(self) -> None:
            pass

    async def _silent(_: object) -> Any:
        return SimpleNamespace(client=SimpleNamespace(answers=False, problem=EVIL))

    monkeypatch.setattr(told_events, "WatchedRun", _Ended)
    monkeypatch.setattr(told_events, "look_once", _silent)
    finder: Any = None
    printed = told_events._Printed(as_json=False)
    assert await told_events._follow(finder, printed) == 0
    assert await told_events._look(finder, printed) == 1
    said = capsys.readouterr().err
    assert "has failed" in said
    assert "does not answer" in said
    assert not _moves(said)


def test_what_the_folder_of_a_run_holds(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Verdict(EVIL, 1, 0, 0, 0, 0, 0, 0, {}, (Difference(1, 0, None, EVIL),), (), 0.0)
    replay._show(verdict)
    said = capsys.readouterr().out
    assert "differs: round 1" in said
    assert not _moves(said)


def test_json_means_the_same_with_its_controls_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    event = EventStatus(number=7, unix_s=1007.0, level="INFO", event="run.stopped", says=f"{EVIL}\u200b")
    told_events._Printed(as_json=True).print_new([event])
    line = capsys.readouterr().out
    assert not _moves(line)
    assert json.loads(line)["says"] == event.says
    assert plain_json('{"a": "é \\n"}') == '{"a": "é \\n"}'
