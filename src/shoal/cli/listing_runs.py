"""`shoal runs`: the runs that have left a folder on this host, whether they live or have ended.

config.yaml -> a run; rounds/ -> how far it is; summary.json -> how it has ended; run.json of what lives -> it lives
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from shoal.cli.output import minute_of, table_lines, without_controls
from shoal.cli.run_folder import CONFIG_FILE, read_object
from shoal.cli.runs_here import living_runs
from shoal.clock import utc_iso
from shoal.errors import ConfigError
from shoal.events.base import SUMMARY_FILE
from shoal.runtime.run_dir import RunNote

if TYPE_CHECKING:
    from shoal.config import Config

_STAMP: Final = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}")
"""In the name of a run, when it was begun, in UTC."""
_ROUND: Final = re.compile(r"round_(\d+)\.json")
_JOINED: Final = re.compile(r"\.(servers|mirror)(-\d+)?$")
"""At the end of the name of a folder, of a run whose client was on another host."""
_TITLES: Final = ("run", "state", "begun (UTC)", "round")
# A line is to fit 80 columns: the folder of a run has its name, and lies with the others.
_ENDED_SHOWN: Final = 3
_LIVES: Final = {"client": "runs", "servers": "serves", "mirror": "mirrors"}


def list_written(log_dir: Path, *, as_json: bool) -> int:
    """Print the runs that have a folder in `log_dir`, the newest last; return the exit code.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    rows = _written_rows(log_dir)
    if as_json:
        print(json.dumps({"runs": rows}))
        return 0
    for line in _written_lines(rows, log_dir) if rows else (f"no run has left {_folder_in(log_dir)}: see --log-dir",):
        print(without_controls(line))
    return 0


def _folder_in(log_dir: Path) -> str:
    return f"a folder in {log_dir.absolute()}"


def _written_lines(rows: Sequence[Mapping[str, Any]], log_dir: Path) -> Iterator[str]:
    yield from table_lines((_TITLES, *map(_cells, rows)))
    yield f"each has {_folder_in(log_dir)}"


def ended_lines(log_dir: Path, wanted: str = "") -> list[str]:
    """Return which runs of this host's clients have ended, the newest last, and what can be done with that one; nothing
    where there is none.

    Args:
        wanted: how the names of those begin that count, or the folder of one.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    folder = str(Path(wanted).resolve())
    rows = [
        row
        for row in _written_rows(log_dir)
        if row["hosts"] == "client" and row["state"] != _LIVES["client"]
        if row["run"].startswith(wanted) or row["log_dir"] == folder
    ]
    if not rows:
        return []
    from shoal.cli.afterwards import how_ended, left_commands, next_lines
    from shoal.cli.run_files import written_config

    newest = Path(rows[-1]["log_dir"])
    lines = [*_written_lines(rows[-_ENDED_SHOWN:], log_dir)]
    how = how_ended(rows[-1]["state"], rows[-1]["failure"])
    lines.append(f"{newest.name}, {minute_of(rows[-1]['ended'])} UTC: {how}")
    with suppress(ConfigError):  # its configuration is damaged, or of another version
        lines += next_lines(left_commands(written_config(newest), newest.name, newest, _summary(newest)))
    return lines


def end_of(folder: Path, config: Config) -> tuple[str, list[str]]:
    """Return how the run in this folder has ended, as a sentence, and commands that come next.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    from shoal.cli.afterwards import how_ended, left_commands

    living = next((note for note in living_runs() if Path(note.log_dir).resolve() == folder), None)
    row = _written_row(folder, 0.0, living)
    lives = row["state"] in _LIVES.values()
    commands = [] if lives else left_commands(config, folder.name, folder, _summary(folder))
    return how_ended(row["state"], row["failure"]), commands


def _summary(folder: Path) -> dict[str, Any]:
    # Who was killed has left none, and goes on like one that was interrupted.
    return read_object(folder / SUMMARY_FILE) or {"exit": "interrupted"}


def _written_rows(log_dir: Path) -> list[dict[str, Any]]:
    living = {Path(note.log_dir).resolve(): note for note in living_runs()}
    folders = {path.parent.resolve() for path in log_dir.glob(f"*/{CONFIG_FILE}")}
    found = sorted(((_begun_unix_s(folder), folder) for folder in folders), key=lambda each: (each[0], each[1].name))
    return [_written_row(folder, begun_unix_s, living.get(folder)) for begun_unix_s, folder in found]


def _written_row(folder: Path, begun_unix_s: float, note: RunNote | None) -> dict[str, Any]:
    summary = read_object(folder / SUMMARY_FILE)
    joined = _JOINED.search(folder.name)
    hosts = joined[1] if joined else "client"
    if note is not None:
        state = _LIVES[note.hosts]
    elif hosts != "client":
        state = "ended"
    else:
        # Who is killed writes no summary.
        state = str(summary.get("exit", "broken off"))
    failure = cast("dict[str, Any]", summary.get("failure") or {})
    rounds = [path.name for path in (folder / "rounds").glob("round_*.json")]
    return {
        "run": folder.name,
        "state": state,
        "begun": utc_iso(begun_unix_s),
        "ended": None if note is not None else str(summary.get("ended") or utc_iso(_written_unix_s(folder))),
        "failure": failure.get("text"),
        "round": max((int(found[1]) for name in rounds if (found := _ROUND.fullmatch(name))), default=0),
        "rounds": _num_rounds(folder) if hosts == "client" else None,
        "hosts": hosts,
        "model": summary.get("model"),
        "log_dir": str(folder),
    }


def _written_unix_s(folder: Path) -> float:
    """When something was last written there, which is all that is known of a run that was killed."""
    return max(path.lstat().st_mtime for path in folder.iterdir())


def _num_rounds(folder: Path) -> int | None:
    """How many rounds a run was to have: by its first record, which costs little, or by what it was told; None: neither
    can be read."""
    first: Any = read_object(folder / "rounds/round_0000.json")
    with suppress(KeyError, TypeError):
        return first["configuration"]["diloco"]["outer_steps"]
    # Who has ended before its first record is rare, and costs what all others need not load.
    from shoal.cli.run_files import written_config

    with suppress(ConfigError):
        return written_config(folder).diloco.outer_steps
    return None


def _begun_unix_s(folder: Path) -> float:
    """When a run was begun, by its name; of another name when its folder was last taken."""
    stamp = _STAMP.search(folder.name)
    with suppress(ValueError):  # digits that are no day, in a name that somebody has given
        if stamp is not None:
            return datetime.strptime(stamp[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    return (folder / CONFIG_FILE).stat().st_mtime


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    round = "-" if row["hosts"] != "client" else f"{row['round']}/{row['rounds'] or '?'}"
    return row["run"], row["state"], minute_of(row["begun"]), round
