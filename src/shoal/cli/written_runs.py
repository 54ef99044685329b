"""`shoal runs`: the runs that have left a folder on this host, whether they live or have ended.

config.yaml -> a run; rounds/ -> how far it is; summary.json -> how it has ended; run.json of what lives -> it lives
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

from shoal.cli.output import without_controls
from shoal.cli.run_files import CONFIG_FILE, SUMMARY_FILE
from shoal.cli.runs_here import living_runs
from shoal.clock import utc_iso
from shoal.runtime.run_note import RunNote

_STAMP: Final = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}")
"""In the name of a run, when it was begun, in UTC."""
_ROUND: Final = re.compile(r"round_(\d+)\.json")
_JOINED: Final = re.compile(r"\.(servers|mirror)(-\d+)?$")
"""At the end of the name of a folder, of a run whose client was on another host."""
_LIVES: Final = {"client": "runs", "servers": "serves", "mirror": "mirrors"}


def list_written(log_dir: Path, *, as_json: bool) -> int:
    """Print the runs that have a folder in `log_dir`, the newest last; return the exit code.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    living = {Path(note.log_dir).resolve(): note for note in living_runs()}
    folders = {path.parent.resolve() for path in log_dir.glob(f"*/{CONFIG_FILE}")}
    found = sorted(((_begun_unix_s(folder), folder) for folder in folders), key=lambda each: (each[0], each[1].name))
    rows = [_told(folder, begun_unix_s, living.get(folder)) for begun_unix_s, folder in found]
    if as_json:
        print(json.dumps({"runs": rows}))
        return 0
    for line in _lines(rows) if rows else (f"no run has left a folder in {log_dir.absolute()}: see --log-dir",):
        print(line)
    return 0


def _told(folder: Path, begun_unix_s: float, note: RunNote | None) -> dict[str, Any]:
    summary = _read(folder / SUMMARY_FILE)
    joined = _JOINED.search(folder.name)
    hosts = joined[1] if joined else "client"
    if note is not None:
        state = _LIVES[note.hosts]
    elif hosts != "client":
        state = "ended"
    else:
        # Who is killed writes no summary.
        state = str(summary.get("exit", "broken off"))
    first: Mapping[str, Any] = _read(folder / "rounds/round_0000.json").get("configuration", {})
    return {
        "run": folder.name,
        "state": state,
        "begun": utc_iso(begun_unix_s),
        "round": max((int(found[1]) for found in map(_ROUND.fullmatch, _names(folder / "rounds")) if found), default=0),
        "rounds": first.get("diloco", {}).get("outer_steps"),
        "hosts": hosts,
        "model": summary.get("model"),
        "log_dir": str(folder),
    }


def _begun_unix_s(folder: Path) -> float:
    """When a run was begun, by its name; of another name when its folder was last taken."""
    if (stamp := _STAMP.search(folder.name)) is None:
        return (folder / CONFIG_FILE).stat().st_mtime
    return datetime.strptime(stamp[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("round_*.json")]


def _read(path: Path) -> dict[str, Any]:
    """Return what a JSON object of a run holds; nothing where there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one line for each run under titles."""
    cells = [("run", "state", "begun", "round", "folder"), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield without_controls("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    round = "-" if row["hosts"] != "client" else f"{row['round']}/{row['rounds'] or '?'}"
    return row["run"], row["state"], row["begun"], round, row["log_dir"]
