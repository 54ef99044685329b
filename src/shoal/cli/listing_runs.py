"""`shoal ps` and `shoal clean`: what runs on this host, and what dead runs have left there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from shoal.cli.runs_here import ask_here, dead_dirs, living_runs
from shoal.clock import SystemClock, utc_iso
from shoal.runtime.fork_servers import tag_of
from shoal.runtime.process_control import end_tagged
from shoal.runtime.process_info import with_environment
from shoal.runtime.run_dir import FoundDir, remove_dead_dir
from shoal.runtime.run_note import RunNote
from shoal.wire.messages.control import AskStatus, RunStatus

_ANSWER_S = 0.5


def list_runs(*, as_json: bool) -> int:
    """Print the runs that live on this host, and what dead ones have left; return the exit code.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    runs = living_runs()
    answers = anyio.run(_ask_all, runs)
    rows = [_row(note, *answer) for note, answer in zip(runs, answers, strict=True)]
    dead = dead_dirs()
    if as_json:
        print(json.dumps({"runs": rows, "left": [str(each.path) for each in dead]}))
        return 0
    for line in _table(rows) if rows else ("no run of yours lives on this host",):
        print(line)
    for each in dead:
        print(f"left of a dead run: {_told(each)}")
    if dead:
        print("`shoal clean` removes it")
    return 0


def clean(*, yes: bool) -> int:
    """List what dead runs have left on this host, and remove it if the user wants that; return the exit code.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    dead = dead_dirs()
    if not dead:
        print("nothing is left of dead runs")
        return 0
    for each in dead:
        print(_told(each))
    if not yes and not _wants():
        return 0
    kept = [each.path for each in dead if not _remove(each)]
    print(f"removed {len(dead) - len(kept)} of {len(dead)}")
    for path in kept:
        print(f"{path} could not be removed", file=sys.stderr)
    return 1 if kept else 0


def _remove(dead: FoundDir) -> bool:
    """Remove a directory, and end what is left of the processes that were started for it."""
    end_tagged(tag_of(dead.path))
    return remove_dead_dir(dead.path)


def _wants() -> bool:
    if not sys.stdin.isatty():
        print("nothing is removed: say --yes")
        return False
    return input("remove this? [y/N] ").strip().lower() in ("y", "yes")


async def _ask_all(runs: Sequence[RunNote]) -> list[tuple[RunStatus | None, str]]:
    """Ask all clients of this host at once."""
    answers: dict[int, tuple[RunStatus | None, str]] = {}

    async def ask(place: int, note: RunNote) -> None:
        answers[place] = await ask_here(note, AskStatus(), RunStatus, _ANSWER_S, SystemClock())

    async with anyio.create_task_group() as tasks:
        for place, note in enumerate(runs):
            if note.hosts == "client":
                tasks.start_soon(ask, place, note)
    return [answers.get(place, (None, "")) for place in range(len(runs))]


def _row(note: RunNote, status: RunStatus | None, problem: str) -> dict[str, Any]:
    if note.hosts != "client":
        state = "serving" if note.hosts == "servers" else "mirroring"
    elif status is None and not Path(note.socket).exists():
        state = "starting"
    else:
        state = f"the client does not answer: {problem}" if status is None else status.state
    return {
        "run": note.run_id,
        "state": state,
        "round": None if status is None else status.round,
        "rounds": None if status is None else status.rounds,
        "paused": None if status is None else status.paused,
        "hosts": note.hosts,
        "since": utc_iso(note.begun_unix_s),
        "launcher_pid": note.launcher_pid,
        "log_dir": note.log_dir,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line for each run under titles; what it does comes last, for it is the longest."""
    titles = ("run", "round", "here", "since", "launcher", "logs", "state")
    cells = [titles, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    round = "-" if row["round"] is None else f"{row['round']}/{row['rounds']}"
    return row["run"], round, row["hosts"], row["since"], str(row["launcher_pid"]), row["log_dir"], row["state"]


def _told(dead: FoundDir) -> str:
    """Say what lies there. Shared memory of a dead run is gone: it has no name, and so is its sockets' other end."""
    paths = [path for path in dead.path.rglob("*") if not path.is_dir()]
    sockets = [path for path in paths if path.is_socket()]
    size_bytes = sum(_size_bytes(path) for path in paths)
    of = "" if dead.note is None else f" of run {dead.note.run_id}"
    processes = with_environment(tag_of(dead.path))
    left = f", processes {', '.join(map(str, processes))}" if processes else ""
    return f"{dead.path}{of}: {len(paths)} files, {len(sockets)} of them sockets, {size_bytes:,} bytes{left}"


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # it has gone meanwhile
