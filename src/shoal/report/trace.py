"""`trace.json`: the course of a run for Perfetto (ui.perfetto.dev) and chrome://tracing.

    rounds      | round 1              | round 2              |
                | train      | average | train      | average |
    events          ^ server 1@box2 is lost
    samples_per_s   ~~~~~\\_____~~~~~~~

Its form is the JSON of the Trace Event Format: complete events for phases, instants for what has happened, and counters
for what is measured each second, of the run and of each process. Times are microseconds since the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.events.base import EVENTS_FILE, name_of
from shoal.events.run import RoundRecorded
from shoal.log import written_lines
from shoal.telemetry.rows import MetricRow

_RUN, _ROUNDS, _PHASES, _EVENTS = 1, 1, 2, 3
_OF_RUN: Final = ("samples_per_s", "targets_per_s", "loss/train", "pipelines")
_OF_PEERS: Final = ("samples_per_s", "busy", "process.memory_bytes")
_RECORDED: Final = name_of(RoundRecorded)


class NotedLine(msgspec.Struct):
    """What a trace shows of a line of `events.jsonl`; the last three are those of a round's record."""

    time: datetime
    level: str
    event: str
    says: str = ""
    round: int = 0
    duration_s: float | None = None
    averaging_s: float | None = None


def read_noted(log_dir: Path) -> Iterator[NotedLine]:
    """Yield what the client of the run in this folder has noted.

    Raises:
        OSError: it cannot be read.
    """
    decode = msgspec.json.Decoder(NotedLine).decode
    for line in written_lines(log_dir / EVENTS_FILE):
        try:
            yield decode(line)
        except msgspec.MsgspecError:
            continue  # whoever wrote it was killed meanwhile, or it is of another version


def trace_of(noted: Iterable[NotedLine], rows: Iterable[MetricRow]) -> bytes:
    """Return the file."""
    events = [each for line in noted for each in _of_line(line)]
    events += [each for row in rows for each in _of_row(row)]
    began = min((each["ts"] for each in events), default=0.0)
    for each in events:
        each["ts"] -= began
    shown = {"traceEvents": [*_names(events), *events], "displayTimeUnit": "ms"}
    return msgspec.json.encode(shown)


def _of_line(line: NotedLine) -> Iterator[dict[str, Any]]:
    at_us = _us(line.time)
    if line.event == _RECORDED and line.duration_s is not None:
        took_us = 1e6 * line.duration_s
        yield _span(f"round {line.round}", _ROUNDS, at_us - took_us, took_us)
        if line.averaging_s is not None:
            average_us = 1e6 * line.averaging_s
            yield _span("train", _PHASES, at_us - took_us, took_us - average_us)
            yield _span("average", _PHASES, at_us - average_us, average_us)
    elif line.says:
        texts = {"says": line.says, "level": line.level}
        yield {"ph": "i", "s": "g", "name": line.event, "pid": _RUN, "tid": _EVENTS, "ts": at_us, "args": texts}


def _of_row(row: MetricRow) -> Iterator[dict[str, Any]]:
    at_us = _us(row.time)
    for name in _OF_RUN:
        if name in row.run:
            yield _counter(name, at_us, row.run[name])
    for who, values in row.peers.items():
        for name in _OF_PEERS:
            if name in values:
                yield _counter(f"{who} {name}", at_us, values[name])


def _names(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if events:
        yield {"ph": "M", "name": "process_name", "pid": _RUN, "args": {"name": "run"}}
        for track, name in ((_ROUNDS, "rounds"), (_PHASES, "phases"), (_EVENTS, "events")):
            yield {"ph": "M", "name": "thread_name", "pid": _RUN, "tid": track, "args": {"name": name}}


def _span(name: str, track: int, from_us: float, took_us: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": _RUN, "tid": track, "ts": from_us, "dur": took_us}


def _counter(name: str, at_us: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": _RUN, "ts": at_us, "args": {"value": value}}


def _us(time: datetime) -> float:
    return 1e6 * time.timestamp()
