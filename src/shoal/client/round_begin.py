"""A client leads, and rounds begin: trainers are told what to do, and whoever is lost from now on is replaced.

what the last round has shared -> Saved -> the data server's plan -> StartRound to each
                       '-- started again: those that the earlier start has begun with, and the rest of their steps
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.data_link import DataLink
from shoal.client.homes import Homes
from shoal.client.inheritance import Inheritance
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.client.saving import Saving
from shoal.client.shares import evaluation_shares
from shoal.client.trainers import TrainerPool
from shoal.config.schema import Config
from shoal.events.run import RoundBegun
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import BeginRound, RoundPlan
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import Evaluation


@dataclass(eq=False, repr=False)
class RoundBegin:
    """Begins rounds, one after the other.

    Attributes:
        speeds: of the round in which an earlier start of this client was.
    """

    machine: RunClient
    config: Config
    coordinator: RoundCoordinator
    ledger: Ledger
    slots: TrainerSlots
    trainers: TrainerPool
    reports: Reports
    data: DataLink
    homes: Homes
    inheritance: Inheritance
    saving: Saving
    speeds: tuple[float, ...]

    def stand(self) -> None:
        """Take the lead over the servers that are there now."""
        self.homes.tell_coordinator()
        self.coordinator.stand()

    async def give(self, record_hash: str) -> None:
        """Give the replicas what a checkpoint has of their inner optimizers, see `Inheritance.give`."""
        await self.inheritance.give(self.homes.in_order(), record_hash)

    async def begin(self, order: BeginRound) -> None:
        """Let the trainers evaluate what stands, where that is due, and do their steps."""
        round, base = order.round, order.base
        slots = frozenset(pipeline.slot for pipeline in self.machine.pipelines)
        if order.left is None:
            await self._begin(order)
            named, steady = self.homes.named, self.coordinator.holders or ()
        else:
            self._adopt(order.left)
            named, steady = None, ()
        shares = self._evaluation_shares(round - 1)

        def go_on(slot: int, rest: StepRange) -> None:
            has_share = self.reports.progress.has_share(round - 1, slot)
            self.homes.start(round, slot, rest, base, None if has_share else shares[slot])

        self.trainers.begin_round(round, slots, order.steps, named=named, steady=steady, go_on=go_on)

    def _adopt(self, plan: RoundPlan) -> None:
        """Take over the trainers of a round that an earlier start of this client has begun."""
        if plan.steps:
            # The data server knows of those that are lost from now on only what is released.
            has_dead = self.slots.generations != plan.generations
            self.data.resume(plan.round, len(plan.pipelines), plan.steps, plan.speeds, has_dead=has_dead)
        self.homes.tell_trainers()

    async def _begin(self, order: BeginRound) -> None:
        round, steps, pipelines = order.round, order.steps, self.machine.pipelines
        if not self.config.run.deterministic:
            self.speeds = self.reports.shares.speeds(pipelines)
        self.reports.begin_round(round, pipelines)
        sizes = len(pipelines), len(self.slots.present), len(self.machine.holders)
        self.ledger.note(RoundBegun(round, len(steps), *sizes))
        plan = RoundPlan(round, steps, pipelines, dict(self.slots.generations), order.begun_s, self.speeds)
        await self.saving.round_begins(plan, order.base)
        if steps:
            self.data.plan(round, len(pipelines), steps, self.speeds)
        self.homes.named = set()
        for slot, share in enumerate(self._evaluation_shares(round - 1)):
            self.homes.start(round, slot, steps, order.base, share)

    def _evaluation_shares(self, base_round: int) -> list[Evaluation | None]:
        is_evaluated = self.config.run.evaluates(base_round, self.config.diloco.outer_steps)
        num_samples = self.ledger.totals.num_holdout if is_evaluated else 0
        return evaluation_shares(base_round, num_samples, len(self.machine.pipelines), self.speeds)
