"""`shoal events` of a run whose client is on another host."""

from __future__ import annotations

import json

import pytest

from shoal.cli.told_events import _Printed
from shoal.control.swarm_status import EventStatus


def _event(number: int, says: str, event: str = "server.lost") -> EventStatus:
    return EventStatus(number=number, unix_s=1000.0 + number, level="WARNING", event=event, says=says)


def test_each_event_is_printed_once_with_what_to_do_also_if_another_client_tells_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = _Printed(as_json=False)
    printed.print_new([_event(1, "it is lost"), _event(2, "it is full", "checkpoint.failed")])
    printed.print_new([_event(1, "it is lost"), _event(2, "it is full", "checkpoint.failed"), _event(3, "\x1b[31mred")])
    # Another client counts anew.
    again = EventStatus(number=1, unix_s=1003.0, level="WARNING", event="server.lost", says="\x1b[31mred")
    printed.print_new([again, _event(4, "it is back", "unknown.event")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1].split()[0] for line in lines if line[0] != " "] == [
        "server.lost",
        "checkpoint.failed",
        "server.lost",
        "unknown.event",
    ]
    assert sum("give the next start another --checkpoint-dir" in line for line in lines) == 1
    assert "\x1b" not in "".join(lines)


def test_with_json_it_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _Printed(as_json=True).print_new([_event(7, "it is lost")])
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "number": 7,
        "unix_s": 1007.0,
        "level": "WARNING",
        "event": "server.lost",
        "says": "it is lost",
        "routine": False,
    }
