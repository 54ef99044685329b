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
from typing import Any, Final

import msgspec

from shoal.errors import MALFORMED
from shoal.events.base import name_of
from shoal.events.run import RoundRecorded
from shoal.monitor.exporters.base import NotedEvent
from shoal.telemetry.rows import MetricRow

_RUN, _ROUNDS, _PHASES, _EVENTS = 1, 1, 2, 3
_OF_RUN: Final = ("samples_per_s", "targets_per_s", "loss/train", "pipelines")
_OF_PEERS: Final = ("samples_per_s", "busy", "process.memory_bytes")
_RECORDED: Final = name_of(RoundRecorded)


def trace_of(noted: Iterable[NotedEvent], rows: Iterable[MetricRow]) -> bytes:
    """Return the file."""
    events = [each for event in noted for each in _of_event(event)]
    events += [each for row in rows for each in _of_row(row)]
    began = min((each["ts"] for each in events), default=0.0)
    for each in events:
        each["ts"] -= began
    shown = {"traceEvents": [*_names(events), *events], "displayTimeUnit": "ms"}
    return msgspec.json.encode(shown)


def _of_event(event: NotedEvent) -> Iterator[dict[str, Any]]:
    try:
        at_us = _us(datetime.fromisoformat(event.time))
        record = msgspec.json.decode(event.line, type=RoundRecorded) if event.event == _RECORDED else None
    except MALFORMED:
        return  # of another version
    if record is not None:
        yield from _of_round(record, at_us)
    elif event.says:
        texts = {"says": event.says, "level": event.level}
        yield {"ph": "i", "s": "g", "name": event.event, "pid": _RUN, "tid": _EVENTS, "ts": at_us, "args": texts}


def _of_round(record: RoundRecorded, at_us: float) -> Iterator[dict[str, Any]]:
    if record.duration_s is None:
        return
    took_us = 1e6 * record.duration_s
    yield _span(f"round {record.round}", _ROUNDS, at_us - took_us, took_us)
    if record.averaging_s is not None:
        average_us = 1e6 * record.averaging_s
        yield _span("train", _PHASES, at_us - took_us, took_us - average_us)
        yield _span("average", _PHASES, at_us - average_us, average_us)


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
