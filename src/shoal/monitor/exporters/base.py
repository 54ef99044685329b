"""What an exporter is: it takes the rows and events of a run as they come, and never makes the monitor wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from shoal.events.base import EVENTS_FILE
from shoal.log import written_lines
from shoal.telemetry.rows import MetricRow
from shoal.wire.messages.control import MetricReport


class NotedEvent(msgspec.Struct, frozen=True):
    """An event that the run's client has noted.

    Attributes:
        time: ISO 8601.
        level: as in logs, "WARNING" where a person may want to act.
        event: its name, see docs/events.md.
        says: the sentence for who watches the run; empty where there is none.
        line: all of it as `events.jsonl` has it, one JSON object.
    """

    time: str
    level: str
    event: str
    says: str = ""
    line: bytes = b""


def noted_event(line: bytes) -> NotedEvent:
    """Return the event that a line of `events.jsonl` holds.

    Raises:
        msgspec.MsgspecError: it holds none.
    """
    return msgspec.structs.replace(msgspec.json.decode(line, type=NotedEvent), line=line)


def read_noted(log_dir: Path) -> Iterator[NotedEvent]:
    """Yield what the client of the run in this folder has noted.

    Raises:
        OSError: it cannot be read.
    """
    for line in written_lines(log_dir / EVENTS_FILE):
        try:
            yield noted_event(line.rstrip(b"\n"))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue  # whoever wrote it was killed meanwhile, or it is of another version


class PeerReport(NamedTuple):
    """What a peer has said last, and what it is called."""

    who: str
    report: MetricReport


class Newest(NamedTuple):
    """The newest numbers, for who looks when they like: of the run as a whole by name, and of the peers."""

    run: Mapping[str, float]
    peers: tuple[PeerReport, ...]


class Exporter(Protocol):
    """One way out."""

    def row(self, row: MetricRow) -> None:
        """Take the numbers of about a second."""
        ...

    def event(self, event: NotedEvent) -> None:
        """Take an event."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Write what is left; blocks, in a thread of its own, for at most so long. Returns whether all is written."""
        ...
