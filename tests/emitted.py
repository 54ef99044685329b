"""Which kinds of events tests emit: `make test-all` says at its end of which no test has.

EMITTED_EVENTS=FOLDER pytest ...      what each worker has emitted itself, and what logs of processes have
python -m tests.emitted FOLDER       the kinds of the catalogue that are in none of them
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.events import base

FOLDER = os.environ.get("EMITTED_EVENTS")
_emitted: set[str] = set()


def record() -> None:
    """From now on remember what this process emits. Comes before modules that emit are imported: they keep `emit`."""
    emit = base.emit

    def recorded(
        logger: logging.Logger, event: base.Event, *, error: BaseException | None = None, level: int | None = None
    ) -> None:
        _emitted.add(event.name)
        emit(logger, event, error=error, level=level)

    base.emit = recorded


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave what this process, and the processes that its tests have started, have emitted."""
    if FOLDER is None:
        return
    factory: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    names = _emitted.union(*map(_logged, factory.getbasetemp().rglob("*.*")))
    folder = Path(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.txt").write_text("\n".join(sorted(names)))


def _logged(path: Path) -> Iterator[str]:
    """Yield the names of the events in a log."""
    if not path.is_file() or (".log" not in path.suffixes and ".jsonl" not in path.suffixes):
        return
    for line in path.read_bytes().splitlines():
        try:
            yield str(json.loads(line)["event"])
        except (ValueError, KeyError, TypeError):
            continue  # of another program, or half of a line


def missing(folder: Path) -> list[str]:
    """Return the kinds that no test has emitted."""
    found = {name for path in folder.glob("*.txt") for name in path.read_text().splitlines()}
    return sorted(base.catalogue().keys() - found)


if __name__ == "__main__":
    lacking = missing(Path(sys.argv[1]))
    print(f"{len(base.catalogue())} kinds of events; no test has emitted {len(lacking)}: {', '.join(lacking)}")
