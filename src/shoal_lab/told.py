"""Whether a run's folder tells each incident once from its beginning to its end, and with the costs that were found."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.errors import InvariantViolation
from shoal.events.base import EVENTS_FILE
from shoal.log import written_lines

_OPENED, _CLOSED = "incident.opened", "incident.closed"
_SAME = ("kind", "who", "host", "stage", "round")


def told_incidents(log_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the events of each incident that `events.jsonl` has, by its number.

    Raises:
        OSError: the file cannot be read.
    """
    told = defaultdict[int, list[dict[str, Any]]](list)
    for line in written_lines(log_dir / EVENTS_FILE):
        event = json.loads(line)
        if event["event"] in (_OPENED, _CLOSED):
            told[event["number"]].append(event)
    return dict(told)


def require_told(log_dir: Path, summary: Mapping[str, Any]) -> None:
    """Check what the folder of a run tells that has ended, and was not resumed.

    Args:
        summary: as in its `summary.json`.

    Raises:
        InvariantViolation: an incident was not opened once and then closed once, or its costs are others than in the
            summary, or their sum is another than that of the audit.
        OSError: the events cannot be read.
    """
    told, incidents = told_incidents(log_dir), summary["incidents"]
    if sorted(told) != list(range(1, len(incidents) + 1)):
        raise InvariantViolation(f"the summary has {len(incidents)} incidents, {EVENTS_FILE} tells {sorted(told)}")
    for number, incident in enumerate(incidents, 1):
        names = [event["event"] for event in told[number]]
        if names != [_OPENED, _CLOSED]:
            raise InvariantViolation(f"incident {number} is told by {names}: {told[number]}")
        for event in told[number]:
            if any(event.get(name) != incident[name] for name in _SAME):
                raise InvariantViolation(f"{event} is not what the summary has: {incident}")
        _, closed = told[number]
        if any(closed[name] != incident[name] for name in ("cause", "steps_lost", "replayed")):
            raise InvariantViolation(f"{closed} has other costs than the summary: {incident}")
    costs = sum(incident["steps_lost"] for incident in incidents) + summary["steps_lost_otherwise"]
    if costs != sum(summary["steps_lost"].values()):
        raise InvariantViolation(f"incidents and what else was lost cost {costs} steps, not {summary['steps_lost']}")
