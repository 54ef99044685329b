"""A user pauses the run, and lets it go on: what that means at its client.

    pause, resume --> noted in the ledger, and so known to the next start of this client
                 '--> the data server leases nothing, or leases again
                 '--> the boundary of the round, and the screens

What is under way ends as always: steps that have their batch, an average, an evaluation. Nobody leaves, and trainers
wait for their next batch as long as it takes.
"""

from __future__ import annotations

from shoal.client.data_link import DataLink
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.events.run import RunPaused, RunResumed
from shoal.runtime.waking import Signal


class Pausing:
    """Whether the run is paused. Only this pauses it.

    Attributes:
        changed: notified when it is paused or resumed.
    """

    def __init__(self, ledger: Ledger, data: DataLink, reports: Reports) -> None:
        """Go on as the ledger says: it knows what earlier starts of this client were told."""
        self.changed = Signal()
        self._ledger = ledger
        self._data = data
        self._reports = reports

    @property
    def is_paused(self) -> bool:
        """Whether no step may begin now."""
        return self._ledger.totals.time.is_paused

    @property
    def by(self) -> str:
        """Who has paused it; empty while it is not paused."""
        return self._ledger.totals.paused_by if self.is_paused else ""

    def pause(self, by: str) -> bool:
        """Pause the run; returns False if it is paused already.

        Raises:
            StorageError: the next start of this client could not know it.
        """
        if self.is_paused:
            return False
        self._ledger.note(RunPaused(by, self._ledger.now_s()))
        self._tell()
        return True

    def resume(self, by: str) -> bool:
        """Let the run go on; returns False if it is not paused. Raises as `pause` does."""
        if not self.is_paused:
            return False
        self._ledger.note(RunResumed(by, self._ledger.now_s()))
        self._tell()
        return True

    def _tell(self) -> None:
        self._data.pause(paused=self.is_paused)
        self.changed.notify()
        self._reports.tell_swarm()
