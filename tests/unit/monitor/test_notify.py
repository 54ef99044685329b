"""The program that hears of warnings."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from shoal.monitor.exporters import notify
from shoal.monitor.exporters.base import noted_event
from shoal.monitor.exporters.notify import NotifyCommand

_KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"
LONG_S = 60.0


def _line(level: str, number: int = 0) -> bytes:
    return json.dumps({"time": "2026-01-01T00:00:00Z", "level": level, "event": "a.b", "number": number}).encode()


def test_the_program_reads_each_warning_in_order_and_nothing_else(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    notices: list[str] = []
    told = NotifyCommand((sys.executable, "-c", _KEEP, str(heard)), notices.append)
    lines = [_line(level, number) for number, level in enumerate(("WARNING", "INFO", "ERROR", "DEBUG", "CRITICAL"))]
    for line in lines:
        told.event(noted_event(line))
    assert told.close(LONG_S)
    assert heard.read_bytes().splitlines() == [lines[0], lines[2], lines[4]]
    assert notices == []


def test_a_program_that_fails_hangs_or_is_not_there_is_named_and_the_next_warning_is_told(tmp_path: Path) -> None:
    for command, reason in (
        ((sys.executable, "-c", "import sys; sys.exit('no such room')"), "exit code 1, no such room"),
        ((sys.executable, "-c", "import signal; signal.pause()"), "not ended within"),
        ((str(tmp_path / "missing"),), "No such file"),
    ):
        notices: list[str] = []
        told = NotifyCommand(command, notices.append, timeout_s=0.3 if "pause" in command[-1] else LONG_S)
        for _ in range(2):
            told.event(noted_event(_line("WARNING")))
        assert told.close(LONG_S)
        assert [reason in notice for notice in notices if "notify.command" in notice] == [True, True], notices


def test_a_program_of_another_user_that_hangs_keeps_no_warning_from_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    notices: list[str] = []
    monkeypatch.setattr(notify.os, "killpg", refused)
    monkeypatch.setattr(notify, "_END_TIMEOUT_S", 0.05)
    told = NotifyCommand((sys.executable, "-c", "import signal; signal.pause()"), notices.append, timeout_s=0.1)
    for _ in range(2):
        told.event(noted_event(_line("WARNING")))
    assert told.close(LONG_S)
    for process in told._hanging:
        process.kill()
        process.communicate()
    assert ["not ended within" in notice for notice in notices if "notify.command" in notice] == [True, True]


def test_without_a_warning_nothing_is_started_and_of_a_flood_only_the_first_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "MAX_QUEUED", 2)
    gate, heard = tmp_path / "gate", tmp_path / "heard"
    command = NotifyCommand(("/bin/sh", "-c", f"cat >> {heard}; cat {gate}"), lambda _: None)
    assert command.close(0.0)
    os.mkfifo(gate)
    for number in range(50):
        command.event(noted_event(_line("WARNING", number)))
    assert not command.close(0.0)
    with gate.open("w"):  # until now the first one was at work
        pass
    gate.unlink()
    gate.touch()
    assert command.close(LONG_S)
    told = [json.loads(line)["number"] for line in heard.read_text().splitlines()]
    assert told == list(range(len(told)))
    assert 2 <= len(told) <= 3, "those that wait, and the one at work"


def test_where_the_system_has_no_thread_for_a_moment_a_warning_is_not_told_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard = tmp_path / "heard"
    told = NotifyCommand((sys.executable, "-c", _KEEP, str(heard)), lambda _: None)
    with monkeypatch.context() as no_room:
        no_room.setattr(threading.Thread, "start", refused)
        told.event(noted_event(_line("WARNING", 1)))
    told.event(noted_event(_line("WARNING", 2)))
    assert told.close(LONG_S)
    assert heard.read_bytes() == _line("WARNING", 2) + b"\n"
