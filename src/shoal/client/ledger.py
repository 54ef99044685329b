"""Where everything goes that happens to a run, as its client sees it.

event --note--> diary, if it is counted
           '--> log
           '--> events.jsonl and the monitor, but for what comes with every step
           '--> the user's screen, if it says something
           '--> RunTotals --what follows from it--> note
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from shoal.client.course import Course
from shoal.client.diary import Diary, DiaryEvent
from shoal.client.totals import RunTotals
from shoal.clock import Clock, utc_iso
from shoal.events.base import EVENTS_FILE, Event, emit, level_name
from shoal.events.run import RunLaunched
from shoal.log import LinesFile, json_line

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Ledger:
    """What has happened in one run.

    Attributes:
        diary: None: nothing is left, and nothing is written down for a next start.
        age_s: returns the seconds since the run was launched.
        log_dir: gets `events.jsonl`; None: there is none.
        show: shows the user a line that stays on the screen.
        totals: what all of it comes to. Only `note` changes them.
        course: is given all of it, for who looks at the run.
        pass_on: is given each line of `events.jsonl` when it is written; for the monitor.
        earlier: what earlier starts of this client have counted since the round began; the totals have it.
    """

    clock: Clock
    diary: Diary | None = None
    _: KW_ONLY
    age_s: Callable[[], float] = lambda: 0.0
    log_dir: Path | None = None
    show: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.course = Course(self.clock)
        self.pass_on: Callable[[str], None] = lambda _: None
        self._file = None if self.log_dir is None else LinesFile(self.log_dir / EVENTS_FILE)
        self.totals = RunTotals() if self.diary is None else self.diary.saved.totals
        self.earlier: Sequence[DiaryEvent] = () if self.diary is None else self.diary.events
        for event in self.earlier:
            self.totals.apply(event)
        if self.totals.launched_s is None:
            self.note(RunLaunched(self.clock.now_s() - self.age_s()))

    def now_s(self) -> float:
        """Return the time of an event that happens now."""
        return self.clock.now_s()

    def run_s(self) -> float:
        """Return the time of the run, which stands still while it is paused."""
        return self.totals.time.at_s(self.clock.now_s())

    def note(self, event: Event) -> None:
        """Something has happened.

        Raises:
            StorageError: it is to be counted and cannot be written into the diary.
        """
        if self.diary is not None and isinstance(event, DiaryEvent):
            self.diary.note(event)
        emit(logger, event)
        said = event.say()
        self.course.take(event, said)
        if event.level > logging.DEBUG:
            line = json_line(self._values(event, said))
            if self._file is not None:
                self._file.write(line)
            self.pass_on(line)
        if said:
            self.show(said)
            if event.do:
                self.show(f"  {event.do}")
        for following in self.totals.apply(event):
            self.note(following)

    def end(self, costs: Sequence[int]) -> None:
        """The run is over: tell what is known of the incidents that are open.

        Args:
            costs: how many steps each of all incidents has cost.
        """
        for event in self.totals.incidents.end(costs):
            self.note(event)
        self.close()

    def close(self) -> None:
        """The run is over, here at least: what still happens is counted, and no next start has to know it."""
        if self.diary is not None:
            self.diary.close()
        if self._file is not None:
            self._file.close()

    def _values(self, event: Event, said: str) -> dict[str, Any]:
        values: dict[str, Any] = {
            "time": utc_iso(self.clock.unix_s()),
            "level": level_name(event.level),
            "event": event.name,
            **event.fields(),
        }
        return values | {"says": said} if said else values
