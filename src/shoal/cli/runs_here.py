"""The runs of this user that live on this host, as `run.json` in the locked directory of each says; and which is meant.

Who only lists them loads nothing else: `shoal.cli.asking` asks their clients.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.errors import ConfigError
from shoal.runtime.fork_servers import tag_of
from shoal.runtime.process_control import end_tagged
from shoal.runtime.run_dir import FoundDir, RunNote, found_dirs


def living_runs() -> list[RunNote]:
    """Return the notes of what lives on this host, the longest first: one of each launcher.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    notes = [each.note for each in found_dirs() if each.is_alive and each.note is not None]
    return sorted(notes, key=lambda note: (note.begun_unix_s, note.run_id))


def dead_dirs() -> list[FoundDir]:
    """Return what dead runs have left; raises as `living_runs`."""
    return [each for each in found_dirs() if not each.is_alive]


def end_leftovers() -> None:
    """End what still runs of launchers that are dead, which is on its way to its own end: it might yet write.

    Raises:
        ConfigError: a runtime directory belongs to another user.
    """
    for dead in dead_dirs():
        end_tagged(tag_of(dead.path))


def choose(wanted: str, runs: Iterable[RunNote]) -> RunNote | None:
    """Return the run that is meant; None if there is none of that name, or no run at all.

    Args:
        wanted: its name, how it begins, or its folder; empty: the only one.

    Raises:
        ConfigError: it may be one of several.
    """
    # Where a run has its client and servers on one host, the client has the say.
    notes = sorted(runs, key=lambda note: note.hosts == "client")
    named = {note.run_id: note for note in notes}
    if wanted in named:
        return named[wanted]
    if wanted and (folder := Path(wanted)).is_dir():
        # `logs/sandbox` is a link to the newest run of that name.
        return next((note for note in reversed(notes) if Path(note.log_dir) == folder.resolve()), None)
    found = [note for run_id, note in named.items() if run_id.startswith(wanted)]
    if len(found) > 1:
        raise ConfigError(f"say which run, there are {', '.join(sorted(note.run_id for note in found))}")
    return found[0] if found else None


def nothing_here(wanted: str, runs: Iterable[RunNote]) -> str:
    """Return what to say where there is no run of this name (empty: none at all) among those that live here."""
    told = f"no run {wanted} of yours lives on this host" if wanted else "no run of yours lives on this host"
    names = ", ".join(dict.fromkeys(note.run_id for note in runs))
    others = f" (but {names})" if names else ""
    return f"{told}{others}: `shoal ps` lists them; for one of other hosts give --initial-peers"
