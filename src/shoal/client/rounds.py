"""The run from its first round to its last, as the client sees it.

    wait for servers -> lead, place -> [ form pipelines -> start trainers -> done -> close -> record ] ... -> evaluate
                         | '-- started again: its trainers are adopted ----------^    '-- or it is recorded already
                         '---- in place of a client of another host: their round is closed first
    `Gathering` ----------------------   `RoundTraining` ---------------------   `RoundEnding` ---

What a round commits is the coordinator's; this module says when it begins and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from shoal.averaging.coordinator import Leading, RoundCoordinator
from shoal.client.diary import RoundPlan
from shoal.client.gathering import Gathering, mirrored
from shoal.client.homes import Homes
from shoal.client.ledger import Ledger
from shoal.client.round_ending import RoundEnding
from shoal.client.round_training import RoundTraining
from shoal.client.saving import Saving
from shoal.config.schema import Config
from shoal.events.run import RoundTakenUp, RunTakenOver
from shoal.wire.messages.base import StepRange


class SideWork(Protocol):
    """Of a client, with work of its own."""

    async def run(self) -> None:
        """Do it until cancelled."""
        ...


class RoundLoop:
    """Runs the outer rounds."""

    def __init__(
        self,
        *,
        config: Config,
        coordinator: RoundCoordinator,
        ledger: Ledger,
        homes: Homes,
        gathering: Gathering,
        training: RoundTraining,
        ending: RoundEnding,
        left: RoundPlan | None,
        saving: Saving,
        beside: Sequence[SideWork],
    ) -> None:
        """Connect the parts; `run` does the work.

        Args:
            left: the round in which an earlier start of this client was.
            beside: run for as long as there are rounds.
        """
        self._config = config
        self._coordinator = coordinator
        self._ledger = ledger
        self._homes = homes
        self._gathering, self._training, self._ending = gathering, training, ending
        self._left = left
        self._saving = saving
        self._beside = beside

    async def run(self) -> None:
        """Train all rounds, then evaluate what came out.

        Raises:
            NoPipeline: a stage had no replica in time, at the start or when this client was started again.
            RoundAborted: another client coordinates the run now.
            ControlError: no trainer could be started, none of them trains, or the replicas are not where this client
                was when it was started again.
            TrainingDiverged: nothing but skipped steps.
            StorageError: records or step logs cannot be written.
        """
        try:
            await self._run()
        finally:
            # A record that was committed from here on would be in no file, and nobody would hold the one before it.
            self._coordinator.retire()
            await self._ending.write_last(self._coordinator.standing)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for part in (self._homes, *self._beside, self._gathering):
                tasks.start_soon(part.run)
            leading, goes_on = await self._gathering.led(self._left, self._training.base)
            while not await self._train_all(leading, goes_on):
                leading, goes_on = await self._coordinator.leading(), False
            await mirrored(self._coordinator, self._ledger)
            self._saving.run_ends(self._training.base)
            tasks.cancel_scope.cancel()

    async def _train_all(self, leading: Leading, goes_on: bool) -> bool:
        """Train all rounds from the record that stands on; returns False if another one of others stands meanwhile.

        With `goes_on` this client was there already, or begins the run.
        """
        is_done = False
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await self._coordinator.overtaken()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            self._homes.holders = leading.holders
            left = await (self._take_up(leading) if goes_on else self._succeed(leading))
            round = self._coordinator.round
            while round <= self._config.diloco.outer_steps:
                await self._round(round, left)
                left = None
                round += 1
            await self._training.evaluate_last(round, left)
            is_done = True
            tasks.cancel_scope.cancel()
        return is_done

    async def _take_up(self, leading: Leading) -> RoundPlan | None:
        """Go on where an earlier start of this client has left the run; return the round that it was in, if any.

        Raises:
            OSError: the record of that round cannot be written.
        """
        plan, outcome = self._left, leading.outcome
        if plan is None:
            return None
        self._homes.pipelines = plan.pipelines
        self._ledger.note(RoundTakenUp(plan.round, leading.base_round))
        if outcome is None or leading.base_round == plan.round - 1:
            return plan
        await self._ending.recorded(outcome, plan.begun_s)
        return None

    async def _succeed(self, leading: Leading) -> RoundPlan | None:
        """Know what the record says that stands, and end the round after it as it is.

        Raises as `RoundEnding.recorded` does.
        """
        self._homes.pipelines = ()
        hashes = await self._ending.inherit(leading)
        self._ledger.note(RunTakenOver(leading.base_round, len(leading.holders), hashes))
        if leading.base_round < self._config.diloco.outer_steps:
            await self._ending.close(leading.base_round + 1, None)

    async def _round(self, round: int, left: RoundPlan | None) -> None:
        begun_s = self._ledger.run_s() if left is None else left.begun_s
        numbers = self._config.diloco.steps_of(round)
        await self._training.train(round, StepRange(numbers.start, numbers.stop) if left is None else left.steps, left)
        await self._ending.close(round, begun_s)
