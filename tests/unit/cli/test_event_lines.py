"""`shoal events` tells what a run has left of what happened; `shoal explain` says what that means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from shoal.cli import event_lines, main
from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.events.base import EVENTS_FILE, Event, catalogue
from shoal.events.mirror import MirrorsBehind
from shoal.events.run import EvaluationDone, RunStopped
from shoal.log import NUM_OLD_FILES, LinesFile


def left(folder: Path, *events: Event) -> Path:
    """A folder as the client of a run leaves it."""
    folder.mkdir(parents=True)
    ledger = Ledger(SystemClock(), log_dir=folder)
    for event in events:
        ledger.note(event)
    ledger.close()
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


def test_events_are_told_with_what_to_do_and_those_of_the_course_of_the_run_in_brief(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(tmp_path / "one", EvaluationDone(3, 1.25), MirrorsBehind(4, 1, 30.0), RunStopped("me"))
    lines = told(capsys, "events", folder)
    assert [line[10:] for line in lines[1:]] == [
        "evaluation.done         held-out loss 1.250 after round 3",
        f"mirrors.behind          WARNING {MirrorsBehind(4, 1, 30.0).say()}",
        f"{'':<24}{MirrorsBehind.do}",
        "run.stopped             stopped by me",
    ]
    assert lines[0].endswith("the run begins")


def test_all_that_was_noted_has_its_values_also_where_they_are_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(tmp_path / "one")
    with (folder / EVENTS_FILE).open("a") as file:
        values = {"time": "2026-01-01T00:00:00Z", "level": "INFO", "event": "of.a.later.version", "peers": "p" * 99}
        file.write(f'{json.dumps(values)}\n{{"event": "cut in the mid')
    assert len(told(capsys, "events", folder)) == 1
    *_, line = told(capsys, "events", folder, "--all")
    assert line.endswith(f"of.a.later.version      peers={'p' * 39}…")


def test_json_is_what_the_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = left(tmp_path / "one", RunStopped("me"))
    lines = told(capsys, "events", folder, "--json")
    assert lines == (folder / EVENTS_FILE).read_text().splitlines()


def test_control_characters_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = left(tmp_path / "one", RunStopped("\x1b]0;owned\x07"))
    assert told(capsys, "events", folder)[-1].endswith(
        "stopped by \N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}"
    )


def test_a_run_is_found_by_name_by_its_beginning_or_as_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path / "gpt-1", RunStopped("first"))
    left(tmp_path / "gpt-10", RunStopped("second"))
    left(tmp_path / "resnet-2", RunStopped("third"))
    (tmp_path / "gpt").symlink_to("gpt-10")
    here = ("--log-dir", tmp_path)
    for wanted, by in {"gpt-1": "first", "gpt-10": "second", "res": "third"}.items():
        assert told(capsys, "events", wanted, *here)[-1].endswith(by)
    assert told(capsys, "events", tmp_path / "gpt")[-1].endswith("second")
    newest = max((tmp_path / "gpt-1", tmp_path / "gpt-10", tmp_path / "resnet-2"), key=_written)
    assert told(capsys, "events", *here)[-1] == told(capsys, "events", newest)[-1]
    error = refused(capsys, "events", "gpt", *here)
    assert "say which run, there are" in error
    assert "gpt-1" in error
    assert "no run called bert" in refused(capsys, "events", "bert", *here)
    assert "no run in" in refused(capsys, "events", "--log-dir", tmp_path / "gpt-1")


def _written(folder: Path) -> float:
    return (folder / EVENTS_FILE).stat().st_mtime


async def test_a_file_is_followed_over_its_successors_until_the_run_is_over(tmp_path: Path) -> None:
    path, lives = tmp_path / EVENTS_FILE, True
    file = LinesFile(path)
    file.write("first")
    read: list[bytes] = []

    async def follow() -> None:
        async for line in event_lines._lines(path, True, lambda: lives):
            read.append(line.rstrip())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await _until(lambda: len(read) == 1)
        file.write("second")
        await _until(lambda: len(read) == 2)
        path.rename(path.with_name(f"{EVENTS_FILE}.1"))
        file.close()
        file.write("third")
        await _until(lambda: len(read) == 3)
        file.write("last")
        lives = False
    file.close()
    assert read == [b"first", b"second", b"third", b"last"]
    assert NUM_OLD_FILES >= 1
    again = [line.rstrip() async for line in event_lines._lines(path, False, lambda: True)]
    assert again == read


async def _until(holds: Any) -> None:
    while not holds():
        await SystemClock().sleep_s(0.01)


def test_each_event_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "explain", "mirrors.behind")
    assert lines[0] == "mirrors.behind (WARNING)"
    assert f"Do: {MirrorsBehind.do}" in lines
    assert "Said: {count} of the run's mirrors" in "\n".join(lines)
    assert len(told(capsys, "explain")) == len(catalogue())
    for name in catalogue():
        assert told(capsys, "explain", name)[0].startswith(f"{name} (")


def test_a_misspelt_event_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean server.lost" in refused(capsys, "explain", "server.lots")
    assert "`shoal explain` lists all" in refused(capsys, "explain", "zzz")
