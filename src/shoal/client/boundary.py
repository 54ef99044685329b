"""The driver of `swarm.round_boundary`: looks whether a round is over whenever something has changed.

a trainer is done, a stage is served or not, the run is paused or resumed, time has passed --> over?
"""

from __future__ import annotations

import math

import anyio

from shoal.client.ledger import Ledger
from shoal.client.pausing import Pausing
from shoal.client.reports import Reports
from shoal.client.stage_watch import StageWatch
from shoal.config.schema import Config
from shoal.runtime.waking import first_of
from shoal.swarm.round_boundary import RoundBoundary
from shoal.swarm.round_deadline import boundary_s


class BoundaryWatch:
    """Says when the trainers of a round are waited for no longer."""

    def __init__(self, config: Config, ledger: Ledger, reports: Reports, stages: StageWatch, pausing: Pausing) -> None:
        """Look at these parts of the client."""
        self._config = config
        self._ledger = ledger
        self._reports = reports
        self._stages = stages
        self._pausing = pausing

    async def reached(self, round: int, slots: frozenset[int]) -> None:
        """Wait for the trainers of a round, which begins now."""
        boundary = RoundBoundary(self._ledger.totals.time, self._timeout_s(round), self._ledger.now_s())
        while True:
            # Taken before looking, so that no change is missed between looking and waiting.
            changes = self._reports.finished.coming, self._stages.changed.coming, self._pausing.changed.coming
            all_done = all(self._reports.is_done(slot) for slot in slots)
            if boundary.is_over(self._ledger.now_s(), all_done=all_done, is_stuck=bool(self._stages.missing)):
                return
            with anyio.move_on_after(boundary.left_s(self._ledger.now_s())):
                await first_of(*changes)

    def _timeout_s(self, round: int) -> float:
        run, is_last = self._config.run, round == self._config.diloco.outer_steps
        # What a slow trainer has under way in the last round, nobody trains in a later one.
        durations_s = () if is_last else self._ledger.totals.durations_s
        return math.inf if run.deterministic else boundary_s(durations_s, run.first_deadline_s)
