"""`shoal events` and `shoal explain`: what has happened to a run of this host's log folder, and what that means.

events.jsonl, as the run's client writes it --lines--> time, name and sentence, with what to do below it
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from shoal.cli.output import without_controls
from shoal.cli.runs_here import living_runs
from shoal.clock import SystemClock
from shoal.errors import ConfigError
from shoal.events.base import EVENTS_FILE, Event, catalogue, level_name
from shoal.events.described import described
from shoal.log import old_files

_LOOK_S = 0.2
_SHOWN_RUNS = 5
_VALUE_CHARACTERS = 40


def print_events(wanted: str, log_dir: Path, *, follow: bool, everything: bool, as_json: bool) -> int:
    """Print what has happened to a run; return the exit code.

    Args:
        wanted: folder or name of the run, or how its name begins; empty: the newest one.
        follow: go on for as long as the run lives on this host.
        everything: also what says nothing to a person who watches.

    Raises:
        ConfigError: there is no such run, or more than one, or its events cannot be read.
    """
    folder = _folder(wanted, log_dir)
    write = partial(_write, known=catalogue(), everything=everything, as_json=as_json)
    try:
        anyio.run(_print, folder, follow, write)
    except OSError as error:
        raise ConfigError(f"cannot read {folder / EVENTS_FILE} ({error.strerror or error})") from error
    return 0


def explain(name: str) -> int:
    """Print what an event means, or without a name which there are; return the exit code.

    Raises:
        ConfigError: there is no such event.
    """
    known = catalogue()
    if not name:
        for each, kind in known.items():
            print(f"{each:<28}{described(kind).happened}")
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


def _folder(wanted: str, log_dir: Path) -> Path:
    """The folder of the run that is meant; raises as `print_events`."""
    if wanted and (Path(wanted) / EVENTS_FILE).is_file():
        return Path(wanted)
    # `logs/sandbox` is a link to the newest run of that name.
    found = {path.parent.resolve(): path.stat().st_mtime for path in log_dir.glob(f"*/{EVENTS_FILE}")}
    folders = sorted((each for each in found if each.name.startswith(wanted)), key=lambda each: -found[each])
    named = [each for each in folders if each.name == wanted or not wanted]
    if not folders:
        which = f"no run called {wanted}" if wanted else "no run"
        raise ConfigError(
            f"{which} in {log_dir.absolute()} has left its events: they are on the host of the run's client; give the "
            "run's folder, or --log-dir"
        )
    if not named and len(folders) > 1:
        names = ", ".join(each.name for each in folders[:_SHOWN_RUNS])
        more = f" and {len(folders) - _SHOWN_RUNS} more" if len(folders) > _SHOWN_RUNS else ""
        raise ConfigError(f"say which run, there are {names}{more}")
    return (named or folders)[0]


async def _print(folder: Path, follow: bool, write: Callable[[bytes], None]) -> None:
    lines = _lines(folder / EVENTS_FILE, follow, lambda: _lives(folder))
    async for line in lines:
        write(line)


def _lives(folder: Path) -> bool:
    return any(Path(note.log_dir).resolve() == folder.resolve() for note in living_runs() if note.hosts == "client")


async def _lines(path: Path, follow: bool, lives: Callable[[], bool]) -> AsyncGenerator[bytes]:
    """Yield lines, the oldest that is kept first; of a file that is followed, new ones as long as something `lives`."""
    clock, begun = SystemClock(), b""
    for old in old_files(path):
        for line in old.read_bytes().splitlines():
            yield line
    file = path.open("rb")
    try:
        while True:
            # Looked at before it is read: whoever has ended, or begun another file, writes no more lines here.
            is_last, is_full = not follow or not lives(), _is_another(path, file.fileno())
            for part in file:
                begun += part
                if begun.endswith(b"\n"):
                    yield begun
                    begun = b""
            if is_full:
                file.close()
                file = path.open("rb")
            elif is_last:
                return
            else:
                await clock.sleep_s(_LOOK_S)
    finally:
        file.close()


def _is_another(path: Path, descriptor: int) -> bool:
    """Whether another file than the open one has its name now."""
    return path.exists() and not os.path.samestat(path.stat(), os.fstat(descriptor))


def _write(line: bytes, known: dict[str, type[Event]], *, everything: bool, as_json: bool) -> None:
    try:
        values: dict[str, Any] = json.loads(line)
        at = datetime.fromisoformat(values.pop("time")).astimezone()
        name, level = str(values.pop("event")), str(values.pop("level"))
    except (ValueError, KeyError, AttributeError, TypeError):
        return  # whoever wrote it was killed meanwhile
    kind = known.get(name)
    said = values.pop("says", "") or _brief(kind, values)
    if not said and not everything:
        return
    if as_json:
        print(line.decode().rstrip(), flush=True)
        return
    for text in _shown(at, name, level, said, values, kind):
        print(without_controls(text), flush=True)


def _brief(kind: type[Event] | None, values: dict[str, Any]) -> str:
    try:
        return "" if kind is None else kind.brief.format_map(values)
    except (KeyError, ValueError, TypeError):
        return ""  # of a round in which nothing was trained, or of another version


def _shown(
    at: datetime, name: str, level: str, said: str, values: dict[str, Any], kind: type[Event] | None
) -> Iterator[str]:
    mark = "" if level == "INFO" else f"{level} "
    told = said or "  ".join(f"{key}={_short(value)}" for key, value in values.items())
    yield f"{at:%H:%M:%S}  {name:<24}{mark}{told}"
    if said and kind is not None and kind.do:
        yield f"{'':<34}{kind.do}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"
