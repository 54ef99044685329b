"""Carries out what `swarm.run_client` decides: the run from its first server to its last record.

a fact has changed, or time has passed --> the machine --> lead, place, begin a round, close it, write its record, ...
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import anyio
from anyio.abc import TaskGroup

from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.round_begin import RoundBegin
from shoal.client.round_records import RoundRecords
from shoal.client.saving import Saving
from shoal.client.succession import Succession, TurnTaken
from shoal.client.trainers import TrainerPool
from shoal.control.membership import Membership
from shoal.ids import Ballot
from shoal.runtime.launcher_messages import StartTrainer
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.client_turn import AskClient, TakeTurn
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


class RunDriver:
    """Runs the outer rounds of one client."""

    def __init__(
        self,
        run: RunClient,
        facts: RunFacts,
        *,
        succession: Succession,
        membership: Membership,
        reassignment: Reassignment,
        trainers: TrainerPool,
        begin: RoundBegin,
        records: RoundRecords,
        ledger: Ledger,
        saving: Saving,
        turn_taken: TurnTaken,
        changes: Sequence[Callable[[], Awaitable[object]]],
    ) -> None:
        """Connect the parts; `run` does the work.

        Args:
            turn_taken: what begins with this client's turn, and goes on for as long as there are rounds.
            changes: each returns when a fact may have changed.
        """
        self._run, self._facts = run, facts
        self._succession = succession
        self._membership = membership
        self._reassignment = reassignment
        self._trainers = trainers
        self._begin, self._records = begin, records
        self._ledger = ledger
        self._saving = saving
        self._turn_taken, self._changes = turn_taken, changes
        self._news = Signal()
        self._operation = anyio.CancelScope()

    def overtaken(self) -> None:
        """Another record stands than the one on which this client trains: what is being carried out is void."""
        self._run.overtaken()
        self._operation.cancel()
        self._news.notify()

    def deposed(self, highest: Ballot) -> None:
        """Another client coordinates the run, under this ballot: what is being carried out is void."""
        self._run.deposed(highest)
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
                for changed in self._changes:
                    tasks.start_soon(pass_on, changed, self._news)
                with ExitStack() as hurry:
                    await self._follow(tasks, hurry)
                tasks.cancel_scope.cancel()
            if self._run.has_turn:
                self._saving.run_ends(self._run.base)
        finally:
            await self._records.write_last()

    async def _follow(self, tasks: TaskGroup, hurry: ExitStack) -> None:
        """Do what is next until all is done; while servers are waited for the registry is asked often."""
        is_hurried = False
        while True:
            # Taken before looking, so that no change is missed between looking and waiting.
            coming = self._news.coming
            while effects := self._run.look(self._facts, self._ledger.now_s()):
                for effect in effects:
                    await self._do(effect, tasks)
            if self._run.phase is RunPhase.OVER:
                return
            was_hurried, is_hurried = is_hurried, self._run.is_hurried or bool(self._facts.stuck)
            if is_hurried and not was_hurried:
                hurry.enter_context(self._membership.eager())
            elif was_hurried and not is_hurried:
                hurry.close()
            with anyio.move_on_after(self._run.wake_at_s - self._ledger.now_s()):
                await coming.wait()

    async def _do(self, effect: RunEffect, tasks: TaskGroup) -> None:
        match effect:
            case AskClient(hop):
                self._succession.ask(hop)
            case TakeTurn():
                await self._turn_taken.begin(tasks)
            case Stand():
                self._begin.stand()
            case PlaceServers():
                self._reassignment.place()
            case StartTrainer():
                self._trainers.start(effect)
            case BeginRound():
                self._begin.begin(effect)
            case EndTraining():
                self._trainers.end_round()
            case CloseRound(round, trained_s):
                self._records.close(round, trained_s)
            case InheritRecord(ready):
                await self._carry_out(self._records.inherit(ready))
            case GiveInner(record_hash):
                await self._carry_out(self._begin.give(record_hash))
            case WriteRecord(ready, begun_s, closed_s):
                await self._carry_out(self._records.recorded(ready, begun_s, closed_s))
            case Failed(error):
                raise error
            case _:
                self._ledger.note(effect)

    async def _carry_out(self, operation: Awaitable[object]) -> None:
        with anyio.CancelScope() as self._operation:
            await operation
            self._run.carried_out()
