"""Ends a run that no server can train any further, where no other host can bring one that could.

    every server of a stage refuses a trainer's step --nobody commits one for five minutes--> the run has failed
                              ^                           '-- a step is committed: it goes on --'

A run that other hosts may join waits for a better server, as it waits for a stage that has none.
"""

from __future__ import annotations

from typing import Final

import anyio

from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.errors import ControlError

PATIENCE_S: Final = 300.0
"""A step is tried again once a minute: who was short of memory for a moment has had a few tries."""
_LOOK_S: Final = 1.0


class Standstill:
    """The watch of one client.

    Args:
        reports: says what servers refuse, and when a step is committed.
        ledger: has the time of the run, which stands still while it is paused.
    """

    def __init__(self, reports: Reports, ledger: Ledger, patience_s: float = PATIENCE_S) -> None:
        self._reports = reports
        self._ledger = ledger
        self._patience_s = patience_s

    async def run(self) -> None:
        """Watch until cancelled.

        Raises:
            ControlError: no step was committed for long, and servers refuse one.
        """
        while True:
            changed = self._reports.refused_changed.coming
            since_s = self._reports.refused_since_s
            if since_s is None:
                await changed.wait()
                continue
            left_s = since_s + self._patience_s - self._ledger.run_s()
            if left_s <= 0:
                raise ControlError(
                    f"no server can compute a step, for {self._patience_s / 60:.0f} minutes now: "
                    f"{self._reports.refusal}. Mend the model or the data, or give the servers less (see step.failed "
                    "in their logs); --resume goes on from the last checkpoint"
                )
            with anyio.move_on_after(max(left_s, min(_LOOK_S, self._patience_s))):
                await changed.wait()
