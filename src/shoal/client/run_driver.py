"""Carries out what `swarm.run_client` decides: the run from its first server to its last record.

a fact has changed, or time has passed --> the machine --> lead, place, begin a round, close it, write its record, ...

The facts are what the client's parts know of the swarm (`ClientFacts`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.data_link import DataLink
from shoal.client.homes import Homes
from shoal.client.keeping import Keeping
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.client.round_begin import RoundBegin
from shoal.client.round_records import RoundRecords
from shoal.client.saving import Saving
from shoal.client.succession import Succession, TurnTaken
from shoal.client.trainers import TrainerPool
from shoal.control.membership import Membership
from shoal.ids import Ballot, PeerId
from shoal.runtime.launcher_messages import StartTrainer
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.client_turn import AskClient, TakeTurn
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import (
    BeginRound,
    CloseRound,
    EndTraining,
    Failed,
    GiveInner,
    InheritRecord,
    PlaceServers,
    RunEffect,
    RunFacts,
    RunPhase,
    Stand,
    WriteRecord,
)
from shoal.swarm.view import SwarmView


@dataclass(eq=False, repr=False)
class RunDriver:
    """Runs the outer rounds of one client.

    Attributes:
        turn_taken: what begins with this client's turn, and goes on for as long as there are rounds.
        changes: each returns when a fact may have changed.
    """

    machine: RunClient
    facts: RunFacts
    succession: Succession
    membership: Membership
    reassignment: Reassignment
    trainers: TrainerPool
    begin: RoundBegin
    records: RoundRecords
    ledger: Ledger
    saving: Saving
    turn_taken: TurnTaken
    changes: Sequence[Callable[[], Awaitable[object]]]
    _news: Signal = field(default_factory=Signal)
    _operation: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def overtaken(self) -> None:
        """Another record stands than the one on which this client trains: what is being carried out is void."""
        self.machine.overtaken()
        self._operation.cancel()
        self._news.notify()

    def deposed(self, highest: Ballot) -> None:
        """Another client coordinates the run, under this ballot: what is being carried out is void."""
        self.machine.deposed(highest)
        self._operation.cancel()
        self._news.notify()

    async def run(self) -> None:
        """Train all rounds, then evaluate what came out; none if the client before this one ends the run.

        Raises:
            NoPipeline: a stage had no replica in time, at the start or when this client was started again.
            RoundAborted: another client coordinates the run now.
            ControlError: the run has failed at the client before this one, no trainer could be started, none of them
                trains, or the replicas are not where this client was when it was started again.
            TrainingDiverged: nothing but skipped steps.
            StorageError: records or step logs cannot be written.
        """
        try:
            async with anyio.create_task_group() as tasks:
                for changed in self.changes:
                    tasks.start_soon(pass_on, changed, self._news)
                with ExitStack() as hurry:
                    await self._follow(tasks, hurry)
                tasks.cancel_scope.cancel()
            if self.machine.has_turn:
                await self.saving.run_ends(self.machine.base)
        finally:
            await self.records.write_last()

    async def _follow(self, tasks: TaskGroup, hurry: ExitStack) -> None:
        """Do what is next until all is done; while servers are waited for the registry is asked often."""
        is_hurried = False
        while True:
            # Taken before looking, so that no change is missed between looking and waiting.
            coming = self._news.coming
            while effects := self.machine.look(self.facts, self.ledger.now_s()):
                for effect in effects:
                    await self._do(effect, tasks)
            if self.machine.phase is RunPhase.OVER:
                return
            was_hurried, is_hurried = is_hurried, self.machine.is_hurried or bool(self.facts.stuck)
            if is_hurried and not was_hurried:
                hurry.enter_context(self.membership.eager())
            elif was_hurried and not is_hurried:
                hurry.close()
            with anyio.move_on_after(self.machine.wake_at_s - self.ledger.now_s()):
                await coming.wait()

    async def _do(self, effect: RunEffect, tasks: TaskGroup) -> None:
        match effect:
            case AskClient(hop):
                self.succession.ask(hop)
            case TakeTurn():
                await self.turn_taken.begin(tasks)
            case Stand():
                self.begin.stand()
            case PlaceServers():
                self.reassignment.place()
            case StartTrainer():
                self.trainers.start(effect)
            case BeginRound():
                with anyio.CancelScope() as self._operation:
                    await self.begin.begin(effect)
                    self.machine.begun(self.ledger.now_s())
            case EndTraining():
                self.trainers.end_round()
            case CloseRound(round, trained_s):
                self.records.close(round, trained_s)
            case InheritRecord(ready):
                await self._carry_out(self.records.inherit(ready))
            case GiveInner(record_hash):
                await self._carry_out(self.begin.give(record_hash))
            case WriteRecord(ready, begun_s, closed_s):
                await self._carry_out(self.records.recorded(ready, begun_s, closed_s))
            case Failed(error):
                raise error
            case _:
                self.ledger.note(effect)

    async def _carry_out(self, operation: Awaitable[object]) -> None:
        with anyio.CancelScope() as self._operation:
            await operation
            self.machine.carried_out()


@dataclass(eq=False, repr=False)
class ClientFacts:
    """`swarm.run_effects.RunFacts` of one client."""

    coordinator: RoundCoordinator
    membership: Membership
    homes: Homes
    reassignment: Reassignment
    keeping: Keeping
    data: DataLink
    reports: Reports
    ledger: Ledger

    @property
    def view(self) -> SwarmView:
        return self.membership.view

    @property
    def leads(self) -> bool:
        return self.coordinator.leads

    @property
    def ready(self) -> RoundReady | None:
        return self.coordinator.ready

    @property
    def holders(self) -> Mapping[PeerId, int] | None:
        return self.coordinator.holders

    @property
    def committed_round(self) -> int:
        return self.coordinator.committed_round

    @property
    def is_placing(self) -> bool:
        return self.reassignment.is_placing

    @property
    def is_handing_over(self) -> bool:
        return self.keeping.is_handing_over

    @property
    def is_letting_go(self) -> bool:
        return self.keeping.is_letting_go

    @property
    def stuck(self) -> Sequence[int]:
        return self.coordinator.stuck

    @property
    def is_unfed(self) -> bool:
        return not self.data.feeds

    @property
    def is_refused(self) -> bool:
        return self.reports.is_refused

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        return self.coordinator.unmirrored

    @property
    def durations_s(self) -> Sequence[float]:
        return self.ledger.totals.durations_s

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        return self.homes.usable(known)

    def is_own(self, ready: RoundReady, base: str) -> bool:
        record = self.coordinator.outcome(ready).record
        return record.ballot.peer == self.coordinator.ballot.peer and record.previous == base

    def is_evaluated(self, round: int) -> bool:
        return not self.ledger.totals.num_holdout or round in self.ledger.totals.progress.eval_losses
