"""`shoal checkpoints`: what can be gone on from at a place, and what is wrong with the rest."""

from __future__ import annotations

import json

from shoal.checkpoint.store import Listed, stores_at
from shoal.cli.output import table_lines
from shoal.clock import utc_iso

# What is wrong comes last, for it is the longest.
_TITLES = ("run", "round", "when", "MB", "state")


def list_checkpoints(location: str, *, as_json: bool) -> None:
    """Read every checkpoint there, and print how it is.

    Raises:
        ConfigError: it is no folder, and no location of an object store.
        StorageError: it cannot be read.
    """
    found = [each for store in stores_at(location) for each in store.listed()]
    if as_json:
        print(json.dumps({"checkpoints": [_as_json(each) for each in found]}), flush=True)
        return
    for line in table_lines((_TITLES, *map(_cells, found))) if found else (f"there is no checkpoint in {location}",):
        print(line, flush=True)


def _as_json(listed: Listed) -> dict[str, object]:
    return {
        "run": listed.run_id,
        "round": listed.round,
        "when": None if listed.unix_s is None else utc_iso(listed.unix_s),
        "size_bytes": listed.size_bytes,
        "good": not listed.problems,
        "problems": list(listed.problems),
    }


def _cells(listed: Listed) -> tuple[str, ...]:
    when = "-" if listed.unix_s is None else utc_iso(listed.unix_s)
    state = f"damaged: {'; '.join(listed.problems)}" if listed.problems else "good"
    # Names may be somebody's who forged a checkpoint: none moves the cursor.
    state = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in state)
    return listed.run_id, str(listed.round), when, f"{listed.size_bytes / 1e6:,.1f}", state
