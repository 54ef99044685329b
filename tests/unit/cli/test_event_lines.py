"""`shoal events` tells what a run has left of what happened; `shoal explain` says what that means."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from shoal.cli import event_lines, main
from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.events.base import EVENTS_FILE, Event, catalogue
from shoal.events.losses import ServerLost
from shoal.events.mirror import MirrorsBehind
from shoal.events.run import EvaluationDone, RunStopped
from shoal.ids import PeerId
from shoal.log import LinesFile


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
    lost = ServerLost(PeerId("p"), "server 1@box2", 0, 0.0, "", ("server 2@box2",), (0,), 1.0)
    folder = left(tmp_path / "one", EvaluationDone(3, 1.25), MirrorsBehind(4, 1, 30.0), lost, RunStopped("me"))
    lines = told(capsys, "events", folder)
    assert [line[10:] for line in lines[1:]] == [
        "evaluation.done         eval loss 1.250 after round 3",
        f"mirrors.behind          WARNING {MirrorsBehind(4, 1, 30.0).say()}",
        f"{'':<24}{MirrorsBehind.do}",
        f"incident.opened         WARNING {lost.told()}",
        f"{'':<24}{ServerLost.do}",
        "run.stopped             stopped by me",
    ]
    assert lines[0].endswith("the run begins")


def test_all_that_was_noted_has_its_values_also_where_they_are_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(tmp_path / "one")
    with (folder / EVENTS_FILE).open("a") as file:
        values = {"time": "2099-01-01T00:00:00Z", "level": "INFO", "event": "of.a.later.version", "peers": "p" * 99}
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
    assert "no run has left events.jsonl" in refused(capsys, "events", "--log-dir", tmp_path / "gpt-1")


def _written(folder: Path) -> float:
    return (folder / EVENTS_FILE).stat().st_mtime


async def test_files_are_followed_over_their_successors_until_the_run_is_over(tmp_path: Path) -> None:
    path, lives = tmp_path / "client_0.log", True
    file = LinesFile(path)
    read: list[str] = []

    def write(number: int) -> None:
        file.write(json.dumps({"time": f"2026-01-01T00:00:{number:02}Z", "level": "INFO", "event": f"e{number}"}))

    async with anyio.create_task_group() as tasks:
        write(1)
        tasks.start_soon(event_lines._follow, tmp_path, "*.log", lambda line: read.append(line.event), lambda: lives)
        await _until(lambda: read == ["e1"])
        write(2)
        await _until(lambda: len(read) == 2)
        path.rename(path.with_name("client_0.log.1"))
        file.close()
        write(3)
        await _until(lambda: len(read) == 3)
        late = LinesFile(tmp_path / "server_0.log")
        late.write('{"time": "2026-01-01T00:00:04Z", "level": "INFO", "event": "e4"}')
        late.close()
        write(5)
        lives = False
    file.close()
    assert read == ["e1", "e2", "e3", "e4", "e5"]
    again: list[str] = []
    await event_lines._follow(tmp_path, "*.log", lambda line: again.append(line.event), lambda: False)
    assert again == read


def test_logs_of_all_roles_are_told_in_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    for second, role, level, more in (
        (2, "server_0", "WARNING", {"peer": "p"}),
        (1, "client_0", "INFO", {}),
        (3, "server_1", "ERROR", {"error": "Traceback\n  of two lines"}),
        (0, "server_12", "DEBUG", {}),
    ):
        values = {"time": f"2026-01-01T00:00:0{second}Z", "level": level, "process": role, "logger": "shoal", **more}
        with (folder / f"{role}.log").open("a") as file:
            file.write(f"{json.dumps({**values, 'event': f'e{second}'})}\n")
    lines = told(capsys, "logs", "one", "--log-dir", tmp_path)
    assert [line[10:] for line in lines[:3]] == [
        "INFO    client_0      e1",
        "WARNING server_0      e2  peer=p",
        "ERROR   server_1      e3",
    ]
    assert lines[3:] == ["Traceback", "  of two lines"]
    assert len(told(capsys, "logs", folder, "--level", "warning", "--json")) == 2
    assert [line[18:] for line in told(capsys, "logs", folder, "--role", "server_0")] == ["server_0      e2  peer=p"]
    assert len(told(capsys, "logs", folder, "--role", "server_1", "--level", "debug", "--json")) == 1
    assert len(told(capsys, "logs", folder, "--role", "server", "--level", "debug", "--json")) == 3
    assert "there is client_0, server_0, server_1" in refused(capsys, "logs", folder, "--role", "monitor")
    assert "there is debug, info, warning and error" in refused(capsys, "logs", folder, "--level", "loud")


async def _until(holds: Any) -> None:
    while not holds():
        await SystemClock().sleep_s(0.01)


def test_each_event_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "explain", "mirrors.behind")
    assert lines[0] == "mirrors.behind (WARNING)"
    assert f"Do: {MirrorsBehind.do}" in lines
    assert "Said: {count} of the run's mirrors" in "\n".join(lines)
    listed = told(capsys, "explain")
    assert len(listed) == len(catalogue())
    assert all(line.startswith(f"{name}  ") for line, name in zip(listed, catalogue(), strict=True))
    for name in catalogue():
        assert told(capsys, "explain", name)[0].startswith(f"{name} (")


def test_a_misspelt_event_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean server.lost" in refused(capsys, "explain", "server.lots")
    assert "`shoal explain` lists all" in refused(capsys, "explain", "zzz")


def test_lines_that_nobody_has_written_so_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT+12")
    time.tzset()
    folder = left(tmp_path / "one", RunStopped("me"))
    good = {"time": "2099-01-01T00:00:00Z", "level": "INFO", "event": "of.nobody", "process": ["a"], "says": ["b"]}
    odd = [{**good, "time": when} for when in ("0001-01-01T00:00:00", "9999-12-31T23:59:59", 1, "²")]
    lines = "".join(json.dumps(each) + "\n" for each in (*odd, [], "x", good))
    with (folder / EVENTS_FILE).open("a") as file:
        file.write(lines)
    (folder / "server_0.log").write_text(lines)
    assert told(capsys, "events", folder)[-1].endswith("of.nobody               ['b']")
    assert "['a']" in told(capsys, "logs", folder)[-1]
    monkeypatch.undo()
    time.tzset()
