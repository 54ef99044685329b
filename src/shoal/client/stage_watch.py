"""Which stages nobody serves while a run goes on, what had to be restored, and what was lost when two sides have met.

Stuck((1,)) -> `TrainingStopped` -> `TrainingStands` now and then -> Stuck(()) -> `TrainingResumed`
                          '-> Restored -> `StageBeganAnew`             ChainLeft -> `ChainLost`

`Standstill` ends a run that no server can train any further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from shoal.averaging.coordinator import CoordinatorEvent
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.errors import ControlError, MisfitError
from shoal.events.stages import (
    ChainLost,
    StageBeganAnew,
    StagesGiven,
    StageStands,
    TrainingResumed,
    TrainingStands,
    TrainingStopped,
    TrainingWaits,
)
from shoal.runtime.waking import Signal
from shoal.swarm.round_effects import ChainLeft, Restored, Stuck

REPEAT_S = 30.0
"""Between messages while training waits."""
PATIENCE_S: Final = 300.0
"""A step is tried again once a minute: who was short of memory for a moment has had a few tries."""
_LOOK_S: Final = 1.0


@dataclass(eq=False, repr=False)
class StageWatch:
    """Follows the stages of one run.

    Attributes:
        repeat_s: pause between messages while training waits.
        is_resumed: servers begin without the state that a checkpoint has, which is no loss.
    """

    ledger: Ledger
    repeat_s: float = REPEAT_S
    is_resumed: bool = False
    missing: tuple[int, ...] = field(default=(), init=False)
    _changed: Signal = field(default_factory=Signal)
    _since_s: float = 0.0

    def take(self, event: CoordinatorEvent) -> None:
        """Take an event of the rounds."""
        match event:
            case Stuck(stages):
                self._miss(stages)
            case Restored():
                self._restore(event)
            case ChainLeft():
                self._leave(event)
            case _:
                pass

    async def _incomplete(self) -> None:
        """Wait until some stage is served by nobody."""
        while not self.missing:
            await self._changed.wait()

    async def run(self) -> None:
        """Say now and then what training waits for, until cancelled."""
        while True:
            await self._incomplete()
            changed = self._changed.coming
            with anyio.move_on_after(self.repeat_s) as timer:
                await changed.wait()
            if timer.cancelled_caught:
                waited_s = round(self.ledger.now_s() - self._since_s)
                self.ledger.note(TrainingStands(self.missing, waited_s))

    def _miss(self, stages: Sequence[int]) -> None:
        before, self.missing = self.missing, tuple(stages)
        if self.is_resumed:
            self.is_resumed = bool(stages)
            if not before:
                self._since_s = self.ledger.now_s()
                self.ledger.note(StagesGiven(self.missing))
        elif not stages:
            self.ledger.note(TrainingResumed(before))
        elif not before:
            self._since_s = self.ledger.now_s()
            self.ledger.note(TrainingStopped(self.missing))
        else:
            # It stands as it stood; only what it waits for is another.
            self.ledger.note(TrainingWaits(self.missing))
        self._changed.notify()

    def _restore(self, event: Restored) -> None:
        basis, in_round = event.basis, event.round + 1
        if basis is None:
            self.ledger.note(StageStands(event.stage, in_round))
        else:
            self.ledger.note(StageBeganAnew(event.stage, in_round, basis.round, basis.hashes.parameters))

    def _leave(self, event: ChainLeft) -> None:
        left, kept = event.left, event.kept
        if any(each.record == left.hash for each in self.ledger.totals.chains_lost):
            return
        self.ledger.note(
            ChainLost(
                base_round=left.round,
                record=left.hash,
                common_round=event.common_round,
                samples=event.num_samples,
                samples_freed=event.num_freed,
                kept_round=kept.round,
                kept_record=kept.hash,
                at_s=self.ledger.now_s(),
            )
        )


class Standstill:
    """Ends a run that no server can train any further, where no other host can bring one that could.

        every server of a stage refuses a trainer's step --nobody commits one for five minutes--> the run has failed
                                  ^                           '-- a step is committed: it goes on --'
        a model of one's own fails at every server of it, for all trainers --at once-------------> the run has failed

    A run that other hosts may join waits for a better server, as it waits for a stage that has none.

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
            MisfitError: the model fails wherever a step is computed.
        """
        while True:
            changed = self._reports.refused_changed.coming
            since_s = self._reports.refused_since_s
            if since_s is None:
                await changed.wait()
                continue
            mistake = self._reports.mistake
            # Who pauses a run finds it as it was.
            if mistake and not self._ledger.totals.time.is_paused:
                raise MisfitError(
                    f"the model fails at every server that computes the step: {mistake}. Mend it there; "
                    f"{self._how_again()}"
                )
            left_s = since_s + self._patience_s - self._ledger.run_s()
            if left_s <= 0:
                raise ControlError(
                    f"no server can compute a step, for {self._patience_s / 60:.0f} minutes now: "
                    f"{self._reports.refusal}. Mend the model or the data, or give the servers less (see step.failed "
                    f"in their logs); {self._how_again()}"
                )
            with anyio.move_on_after(_LOOK_S if mistake else max(left_s, min(_LOOK_S, self._patience_s))):
                await changed.wait()

    def _how_again(self) -> str:
        # Before the first round is recorded there is nothing to go on from.
        is_kept = self._ledger.totals.rounds > 0
        return "--resume goes on from the last checkpoint" if is_kept else "then start it again"
