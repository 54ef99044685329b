"""`shoal events`, `shoal logs` and `shoal explain`: what has happened to a run of this host, and what that means.

events.jsonl, by the run's client --.                              .--> time, name, sentence; what to do below it
*.log, by each role               --'-> lines, in order of time --'--> time, level, role, name and values
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import anyio

from shoal.cli.output import plain_json, without_controls
from shoal.cli.runs_here import living_runs
from shoal.clock import SystemClock
from shoal.errors import MALFORMED, ConfigError
from shoal.events.base import EVENTS_FILE, Event, brief_of, catalogue, level_name
from shoal.events.described import described
from shoal.events.incidents import explained_by
from shoal.log import old_files

_LOOK_S = 0.2
_SHOWN_RUNS = 5
_VALUE_CHARACTERS = 40
_LOGS = "*.log"


class Line(NamedTuple):
    """One line of a file of JSON objects."""

    at: datetime
    level: str
    event: str
    values: dict[str, Any]
    text: str


def print_events(wanted: str, log_dir: Path, *, follow: bool, everything: bool, as_json: bool) -> int:
    """Print what has happened to a run; return the exit code.

    Args:
        wanted: folder or name of the run, or how its name begins; empty: the newest one.
        follow: go on for as long as the run lives on this host.
        everything: also what says nothing to a person who watches.

    Raises:
        ConfigError: there is no such run, or more than one, or its events cannot be read.
    """
    folder = written_run(wanted, log_dir, EVENTS_FILE)
    told = partial(told_to_people, everything=everything)
    _print(folder, EVENTS_FILE, told, follow=follow, as_json=as_json)
    return 0


def print_logs(wanted: str, log_dir: Path, *, role: str, level: str, follow: bool, as_json: bool) -> int:
    """Print what the roles of a run have logged on this host, in order of time; return the exit code.

    Args:
        wanted: as for `print_events`.
        role: as `server` or `server_1`; empty: all of them.
        level: the least severe one.

    Raises:
        ConfigError: as `print_events`; there is no such role or level.
    """
    least = logging.getLevelNamesMapping().get(level.upper())
    if least is None:
        raise ConfigError(f"--level {level}: there is debug, info, warning and error")
    folder = written_run(wanted, log_dir, _LOGS)
    # server: all of them; server_1: not server_12 as well.
    pattern = f"{role}[._]*log" if role else _LOGS
    if not any(folder.glob(pattern)):
        there = ", ".join(sorted(path.stem for path in folder.glob(_LOGS)))
        raise ConfigError(f"no role called {role} has logged in {folder}; there is {there}")
    _print(folder, pattern, partial(_logged, least=least), follow=follow, as_json=as_json)
    return 0


def explain(name: str) -> int:
    """Print what an event means, or without a name which there are; return the exit code.

    Raises:
        ConfigError: there is no such event.
    """
    known = catalogue()
    if not name:
        width = max(map(len, known))
        for each, kind in known.items():
            print(f"{each:<{width}}  {described(kind).happened}")
        return 0
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`shoal explain` lists all"
        raise ConfigError(f"there is no event called {name}: {hint}")
    said = described(known[name])
    print(f"{name} ({level_name(known[name].level)})\n{said.happened}")
    for title, text in said.parts:
        print(f"\n{title}: {text}")
    if said.fields:
        print(f"\nFields: {', '.join(said.fields)}")
    return 0


def written_run(wanted: str, log_dir: Path, *patterns: str) -> Path:
    """Return the folder of the run that is meant, which has a file like one of these.

    Raises:
        ConfigError: there is no such run, or more than one.
    """
    if wanted and any(any(Path(wanted).glob(pattern)) for pattern in patterns):
        return Path(wanted)
    # `logs/sandbox` is a link to the newest run of that name.
    found: dict[Path, float] = {}
    for path in chain.from_iterable(log_dir.glob(f"*/{pattern}") for pattern in patterns):
        folder = path.parent.resolve()
        found[folder] = max(found.get(folder, 0.0), path.stat().st_mtime)
    folders = sorted((each for each in found if each.name.startswith(wanted)), key=lambda each: -found[each])
    named = [each for each in folders if each.name == wanted or not wanted]
    if not folders:
        which = f"no run called {wanted}" if wanted else "no run"
        where = "" if patterns == (_LOGS,) else "; it is on the host of the run's client"
        left = " or ".join(patterns)
        raise ConfigError(
            f"{which} has left {left} in a folder in {log_dir.absolute()}{where}: give its folder, or --log-dir"
        )
    if not named and len(folders) > 1:
        names = ", ".join(each.name for each in folders[:_SHOWN_RUNS])
        more = f" and {len(folders) - _SHOWN_RUNS} more" if len(folders) > _SHOWN_RUNS else ""
        raise ConfigError(f"say which run, there are {names}{more}")
    return (named or folders)[0]


def _print(folder: Path, pattern: str, told: Callable[[Line], Iterable[str]], *, follow: bool, as_json: bool) -> None:
    """Print what is told of the lines in such files; raises ConfigError if one cannot be read."""

    def write(line: Line) -> None:
        texts = [without_controls(text) for text in told(line)]
        for text in [plain_json(line.text)] * bool(texts) if as_json else texts:
            print(text, flush=True)

    try:
        anyio.run(_follow, folder, pattern, write, (lambda: _lives(folder)) if follow else lambda: False)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename or folder} ({error.strerror or error})") from error


def _lives(folder: Path) -> bool:
    return any(Path(note.log_dir).resolve() == folder.resolve() for note in living_runs())


async def _follow(folder: Path, pattern: str, write: Callable[[Line], None], lives: Callable[[], bool]) -> None:
    """Give what is in such files, in order of time; then what is added to them, as long as something `lives`."""
    clock = SystemClock()
    with ExitStack() as stack:
        files: dict[Path, _File] = {}
        while True:
            # Looked at before files are read: whoever has ended writes no more lines.
            is_last = not lives()
            for path in _paths(folder, pattern):
                if path not in files:
                    files[path] = _File(path)
                    stack.callback(files[path].close)
            new = (line for file in files.values() for text in file.new_lines() if (line := _parsed(text)))
            for line in sorted(new, key=lambda line: line.at):
                write(line)
            if is_last:
                return
            await clock.sleep_s(_LOOK_S)


def _paths(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


class _File:
    """A file of lines that somebody may still write, bounded as `shoal.log` keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._begun = b""  # of the line that is being written

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def new_lines(self) -> Iterator[bytes]:
        """Yield the whole lines that have come since; at first all that are kept. Raises OSError."""
        if self._file is None:
            for old in old_files(self._path):
                yield from old.read_bytes().splitlines()
            self._file = self._path.open("rb")
        # Looked at before it is read: who has begun another file writes no more lines to this one.
        while self._is_full(self._file):
            yield from self._whole(self._file)
            self._file.close()
            self._file = self._path.open("rb")
        yield from self._whole(self._file)

    def _whole(self, file: BinaryIO) -> Iterator[bytes]:
        for part in file:
            self._begun += part
            if self._begun.endswith(b"\n"):
                yield self._begun
                self._begun = b""

    def _is_full(self, file: BinaryIO) -> bool:
        return self._path.exists() and not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))


def _parsed(text: bytes) -> Line | None:
    try:
        values: dict[str, Any] = json.loads(text)
        at = datetime.fromisoformat(values.pop("time")).astimezone()
        return Line(at, str(values.pop("level")), str(values.pop("event")), values, text.decode().rstrip())
    except (KeyError, AttributeError, TypeError, OverflowError, *MALFORMED):
        return None  # whoever wrote it was killed meanwhile


def told_to_people(line: Line, *, everything: bool = False) -> Iterator[str]:
    """Yield what a person reads of something that the client has noted: what has happened, and below it what to do."""
    kind = _known().get(line.event)
    said = line.values.get("says", "") or (brief_of(kind, line.values) if kind is not None else "")
    if not said and not everything:
        return
    mark = "" if line.level == "INFO" else f"{line.level} "
    yield f"{line.at:%H:%M:%S}  {line.event:<24}{mark}{said or _short(line.values)}"
    explained = _known().get(explained_by(line.event, line.values))
    if said and explained is not None and explained.do:
        yield f"{'':<34}{explained.do}"


@cache
def _known() -> dict[str, type[Event]]:
    return catalogue()


def _logged(line: Line, least: int) -> Iterator[str]:
    """What a person reads of a line of a log."""
    if logging.getLevelNamesMapping().get(line.level, logging.ERROR) < least:
        return
    values = {name: value for name, value in line.values.items() if name not in ("process", "logger", "error")}
    role = str(line.values.get("process", ""))
    yield f"{line.at:%H:%M:%S}  {line.level:<8}{role:<14}{line.event}  {_short(values)}".rstrip()
    if "error" in line.values:
        yield str(line.values["error"])


def _short(values: dict[str, Any]) -> str:
    texts = ((name, str(value)) for name, value in values.items())
    most = _VALUE_CHARACTERS
    return "  ".join(f"{name}={text if len(text) <= most else f'{text[: most - 1]}…'}" for name, text in texts)
