"""What an exporter is: it takes the rows and events of a run as they come, and never makes the monitor wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from shoal.errors import MALFORMED
from shoal.events.base import EVENTS_FILE
from shoal.log import written_lines
from shoal.telemetry.rows import MetricRow
from shoal.wire.messages.control import MetricReport

_Item = TypeVar("_Item")


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
        ValueError, RecursionError: it holds none.
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
        except MALFORMED:
            continue  # whoever wrote it was killed meanwhile, or it is of another version


class PeerReport(NamedTuple):
    """What a peer has said last, and what it is called."""

    who: str
    report: MetricReport


class Newest(NamedTuple):
    """The newest numbers, for who looks when they like: of the run as a whole by name, and of the peers."""

    run: Mapping[str, float]
    peers: tuple[PeerReport, ...]


class FedThread(Generic[_Item]):
    """A thread that works on what it is given, begun with the first of it: what waits for others does so there."""

    def __init__(self, name: str, work: Callable[[Iterator[_Item]], object], max_queued: int) -> None:
        """Begin nothing yet.

        Args:
            work: is called in the thread with what is put in, in order; it ends at the end of that, or before.
            max_queued: beyond so many that wait, what comes is dropped.
        """
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # A daemon: what hangs there must not keep the process.
        self._thread = threading.Thread(target=lambda: work(iter(self._queue.get, None)), name=name, daemon=True)
        self._max_queued = max_queued

    def put(self, item: _Item) -> None:
        """Have the thread work on this, unless it cannot keep up, or has ended."""
        if self._thread.ident is None:
            # The system may have no thread left for a moment: the next item tries again.
            with suppress(RuntimeError):
                self._thread.start()
        if self._thread.is_alive() and self._queue.qsize() < self._max_queued:
            self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """Wait for at most so long until it has worked on everything. Returns whether it has."""
        if self._thread.ident is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


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
