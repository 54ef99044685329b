"""A round is trained: its pipelines are formed, each has a trainer, and they do its steps until it is over.

pipelines (`Homes`) -> trainers -> what the last round leaves to spares -> StartRound to each -> boundary
                        '-- started again: those that the earlier start has begun with, and the rest of their steps
"""

from __future__ import annotations

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.boundary import BoundaryWatch
from shoal.client.data_link import DataLink
from shoal.client.diary import RoundPlan, Saved
from shoal.client.homes import Homes
from shoal.client.inheritance import Inheritance
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.client.saving import Saving
from shoal.client.shares import evaluation_shares
from shoal.client.trainers import TrainerPool
from shoal.config.schema import Config
from shoal.events.run import EvaluationIncomplete, RoundBegun
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import Evaluation

_MAX_EVALUATIONS = 3
_RETURN_S = 5.0
"""So long may a trainer that is there take to dial a client that was started again."""


class RoundTraining:
    """Trains rounds, one after the other.

    Attributes:
        base: hash of the record on top of which the round is trained.
    """

    def __init__(
        self,
        *,
        config: Config,
        coordinator: RoundCoordinator,
        ledger: Ledger,
        slots: TrainerSlots,
        trainers: TrainerPool,
        reports: Reports,
        data: DataLink,
        homes: Homes,
        inheritance: Inheritance,
        boundary: BoundaryWatch,
        saved: Saved,
        saving: Saving,
    ) -> None:
        """Connect the parts.

        Args:
            boundary: says when the trainers of a round are waited for no longer.
            saved: how an earlier start of this client has left the run.
        """
        self.base = saved.base
        self._config = config
        self._coordinator = coordinator
        self._ledger = ledger
        self._slots, self._trainers = slots, trainers
        self._reports = reports
        self._data = data
        self._homes = homes
        self._inheritance = inheritance
        self._boundary = boundary
        self._saving = saving
        self._speeds: tuple[float, ...] = () if saved.plan is None else saved.plan.speeds

    async def train(self, round: int, steps: StepRange, left: RoundPlan | None) -> None:
        """Let the trainers evaluate what stands, where that is due, and do their steps; returns at the boundary."""
        if left is None:
            await self._begin(round, steps)
        else:
            await self._adopt(left)
        progress, shares = self._reports.progress, self._evaluation_shares(round - 1)

        def go_on(slot: int, rest: StepRange) -> None:
            has_share = progress.has_share(round - 1, slot)
            self._homes.start(round, slot, rest, self.base, None if has_share else shares[slot])

        slots = frozenset(pipeline.slot for pipeline in self._homes.pipelines)
        named, steady = (self._homes.named, self._coordinator.holders or ()) if left is None else (None, ())
        async with self._trainers.training(round, slots, steps, named=named, steady=steady, go_on=go_on):
            await self._boundary.reached(round, slots)

    async def evaluate_last(self, round: int, left: RoundPlan | None) -> None:
        """Evaluate the last record; again, with new trainers, if some were lost with their shares."""
        first = self._config.diloco.total_steps
        for _ in range(_MAX_EVALUATIONS):
            await self.train(round, StepRange(first, first), left)
            left = None
            if not self._ledger.totals.num_holdout or round - 1 in self._reports.progress.eval_losses:
                return
            self._ledger.note(EvaluationIncomplete(round - 1))

    async def _adopt(self, plan: RoundPlan) -> None:
        """Take over the trainers of a round that an earlier start of this client has begun."""
        await self._trainers.returned(_RETURN_S)
        if plan.steps:
            # The data server knows of those that are lost from now on only what is released.
            has_dead = self._slots.generations != plan.generations
            self._data.resume(plan.round, len(plan.pipelines), plan.steps, plan.speeds, has_dead=has_dead)
        self._homes.tell_trainers()

    async def _begin(self, round: int, steps: StepRange) -> None:
        """Form the pipelines of a round and start its trainers."""
        durations_s = self._ledger.totals.durations_s
        await self._homes.form(durations_s[-1] if durations_s else 0.0)
        await self._trainers.ensure(len(self._homes.pipelines))
        await self._inheritance.give(self._homes.in_order(), self._coordinator.record_hash)
        if not self._config.run.deterministic:
            self._speeds = self._reports.shares.speeds(self._homes.pipelines)
        self._reports.begin_round(round, self._homes.pipelines)
        sizes = len(self._homes.pipelines), len(self._slots.present), len(self._homes.holders)
        self._ledger.note(RoundBegun(round, len(steps), *sizes))
        generations, self.base = dict(self._slots.generations), self._coordinator.record_hash
        plan = RoundPlan(round, steps, self._homes.pipelines, generations, self._ledger.run_s(), self._speeds)
        self._saving.round_begins(plan, self.base)
        if steps:
            self._data.plan(round, len(self._homes.pipelines), steps, self._speeds)
        for slot, share in enumerate(self._evaluation_shares(round - 1)):
            self._homes.start(round, slot, steps, self.base, share)

    def _evaluation_shares(self, base_round: int) -> list[Evaluation | None]:
        is_evaluated = self._config.run.evaluates(base_round, self._config.diloco.outer_steps)
        num_samples = self._ledger.totals.num_holdout if is_evaluated else 0
        return evaluation_shares(base_round, num_samples, len(self._homes.pipelines), self._speeds)
