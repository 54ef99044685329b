"""`shoal ps` and `shoal clean`: what runs on this host, and what dead runs have left there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.output import minute_of, table_lines, without_controls
from shoal.cli.runs_here import dead_dirs, living_runs
from shoal.clock import utc_iso
from shoal.runtime.fork_servers import tag_of
from shoal.runtime.process_control import end_tagged
from shoal.runtime.process_info import with_environment
from shoal.runtime.run_dir import FoundDir, RunNote, remove_dead_dir

if TYPE_CHECKING:
    from shoal.wire.messages.control import RunStatus

_ANSWER_S = 0.5
# What a run does comes last, for it is the longest.
_TITLES = ("run", "round", "here", "since (UTC)", "launcher", "logs", "state")


def list_runs(*, as_json: bool) -> int:
    """Print the runs that live on this host, and what dead ones have left; return the exit code.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    runs = living_runs()
    rows = [_row(note, *answer) for note, answer in zip(runs, _answers(runs), strict=True)]
    dead = dead_dirs()
    if as_json:
        print(json.dumps({"runs": rows, "left": [str(each.path) for each in dead]}))
        return 0
    for line in table_lines((_TITLES, *map(_cells, rows))) if rows else ("no run of yours lives on this host",):
        print(without_controls(line))
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


def _answers(runs: Sequence[RunNote]) -> list[tuple[RunStatus | None, str]]:
    """Return what the client of each run says, or why it says nothing; ("": it is not on this host)."""
    clients = [note for note in runs if note.hosts == "client"]
    if not clients:
        return [(None, "")] * len(runs)
    # Who has nobody to ask does not load what asks.
    from shoal.cli.asking import statuses_here

    answers = iter(statuses_here(clients, _ANSWER_S))
    return [next(answers) if note.hosts == "client" else (None, "") for note in runs]


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


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    round = "-" if row["round"] is None else f"{row['round']}/{row['rounds']}"
    since, launcher = minute_of(row["since"]), str(row["launcher_pid"])
    return row["run"], round, row["hosts"], since, launcher, row["log_dir"], row["state"]


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
