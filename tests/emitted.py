"""Which kinds of events, and which numbers, tests bring about: `make test-all` names the others at its end.

EMITTED_EVENTS=FOLDER pytest ...      what each worker has emitted and measured itself, and what files of processes have
python -m tests.emitted FOLDER       what of the catalogues is in none of them

A number counts if code of the product has measured it, and it is not 0; one that a test makes by itself does not.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import MALFORMED
from shoal.events import base
from shoal.telemetry.catalogue import CATALOGUE, RUN
from shoal.telemetry.registry import Counter, Gauge, Histogram, MetricRegistry, base_name

FOLDER = os.environ.get("EMITTED_EVENTS")

ALLOWED: Mapping[str, str] = {}
"""What no test of this machine can bring about, and why not."""

_EVENT, _NUMBER, _RUN_NUMBER = "event", "number", "run number"
_emitted: set[str] = set()
_Number = Counter | Gauge | Histogram
_posted: set[str] = set()
_measured: dict[int, tuple[str, _Number]] = {}


def record() -> None:
    """From now on remember what this process emits and measures. Comes before modules that do so are imported."""
    emit = base.emit

    def recorded(
        logger: logging.Logger, event: base.Event, *, error: BaseException | None = None, level: int | None = None
    ) -> None:
        _emitted.add(event.name)
        emit(logger, event, error=error, level=level)

    base.emit = recorded
    gate = importlib.import_module("shoal.log").FloodGate  # which writes events by itself
    let_through = gate.emit

    def gated(self: Any, event: base.Event, source: str) -> None:
        _emitted.add(event.name)
        let_through(self, event, source)

    gate.emit = gated
    reports = importlib.import_module("shoal.client.reports").Reports
    send = reports._send

    def sent(self: Any, values: Mapping[str, float], steps: int) -> None:
        _posted.update(name.partition("/")[0] for name in values)
        send(self, values, steps)

    reports._send = sent
    for kind in ("counter", "gauge", "histogram"):
        setattr(MetricRegistry, kind, _remembering(getattr(MetricRegistry, kind)))


def _remembering(asked: Callable[..., _Number]) -> Callable[..., _Number]:
    def remembered(registry: MetricRegistry, name: str, **labels: str | int) -> _Number:
        number = asked(registry, name, **labels)
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("shoal."):
            _measured[id(number)] = name, number
        return number

    return remembered


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave what this process, and the processes that its tests have started, have emitted and measured."""
    if FOLDER is None:
        return
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    found = {f"{_EVENT} {name}" for name in _emitted}
    found |= {f"{_RUN_NUMBER} {name}" for name in _posted}
    found |= {f"{_NUMBER} {name}" for name, number in _measured.values() if _is_known(number)}
    found = found.union(*map(_written, factory.getbasetemp().rglob("*.*")))
    folder = Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.txt").write_text("\n".join(sorted(found)))


def _is_known(number: _Number) -> bool:
    if isinstance(number, Histogram):
        return bool(number.counts)
    return number.value is not None if isinstance(number, Gauge) else number.value > 0


def _written(path: Path) -> Iterator[str]:
    """Yield what a log, or a file with the numbers of a run, has."""
    if not path.is_file() or (".log" not in path.suffixes and ".jsonl" not in path.suffixes):
        return
    for line in path.read_bytes().splitlines():
        try:
            yield from _said(json.loads(line))
        except (KeyError, TypeError, AttributeError, *MALFORMED):
            continue  # of another program, or half of a line


def _said(line: dict[str, Any]) -> Iterator[str]:
    if "event" in line:
        yield f"{_EVENT} {line['event']}"
        return
    for name in line["run"]:
        yield f"{_RUN_NUMBER} {name.partition('/')[0]}"
    for values in line["peers"].values():
        yield from (f"{_NUMBER} {base_name(name).partition('/')[0]}" for name, value in values.items() if value)


def missing(folder: Path) -> list[str]:
    """Return what no test has brought about, and what is allowed to be missing although one has."""
    found = {name for path in folder.glob("*.txt") for name in path.read_text().splitlines()}
    wanted = {f"{_EVENT} {name}" for name in base.catalogue()}
    wanted |= {f"{_NUMBER} {name}" for name in CATALOGUE} | {f"{_RUN_NUMBER} {name}" for name in RUN}
    return sorted((wanted - found) ^ ALLOWED.keys())


def main(folder: Path) -> int:
    """Say what is missing; returns 1 if something is."""
    lacking = missing(folder)
    known = f"{len(base.catalogue())} kinds of events, {len(CATALOGUE) + len(RUN)} numbers"
    print(f"{known}; no test has brought about {len(lacking)}{': ' if lacking else ''}{', '.join(lacking)}")
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
