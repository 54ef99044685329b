"""A ledger of tests."""

from __future__ import annotations

from shoal.client.ledger import Ledger
from shoal.client.totals import RunTotals
from shoal.clock import Clock, SystemClock
from shoal.events.base import Event


class NotedLedger(Ledger):
    """Writes nothing, and remembers what was noted and what was shown."""

    def __init__(self, clock: Clock | None = None, *, age_s: float = 0.0) -> None:
        self.noted: list[Event] = []
        self.said: list[str] = []
        super().__init__(clock or SystemClock(), age_s=lambda: age_s, show=self.said.append)
        self.noted.clear()

    def note(self, event: Event) -> None:
        self.noted.append(event)
        super().note(event)


def totals_of(*events: Event) -> RunTotals:
    totals = RunTotals()
    for event in events:
        totals.apply(event)
    return totals
