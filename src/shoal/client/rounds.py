"""The run from its first round to its last, as the client sees it.

    wait for servers -> lead, place -> [ form pipelines -> start trainers -> done -> close -> record ] ... -> evaluate
                         | '-- started again: its trainers are adopted ----------^    '-- or it is recorded already
                         '---- in place of a client of another host: their round is closed first

What a round commits is the coordinator's; this module says when it begins and ends, and writes down what came of it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio.to_thread

from shoal.averaging.audit import lost_in
from shoal.averaging.coordinator import Leading, RoundCoordinator, RoundOutcome
from shoal.averaging.journal import write_round
from shoal.client.boundary import BoundaryWatch
from shoal.client.checkpointing import Checkpointing
from shoal.client.data_link import DataLink
from shoal.client.diary import RoundPlan, Saved
from shoal.client.divergence import Divergence
from shoal.client.gathering import (
    all_hold,
    is_where_it_was,
    lead,
    look_for_servers,
    mirrored,
    settled,
    wait_for_servers,
)
from shoal.client.homes import Homes
from shoal.client.inheritance import Inheritance
from shoal.client.last_words import write_last
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.client.shares import evaluation_shares
from shoal.client.stage_watch import StageWatch
from shoal.client.succession import inherit
from shoal.client.trainers import TrainerPool
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.errors import ControlError
from shoal.events.incidents import StepsLost
from shoal.events.run import EvaluationIncomplete, RoundBegun, RoundRecorded, RoundSlow, RoundTakenUp, RunTakenOver
from shoal.ids import PeerId
from shoal.swarm.records import parameters_of
from shoal.swarm.sample_ranges import count
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import Evaluation, StartRound
from shoal.wire.messages.round import Record

_MAX_IDLE_ROUNDS = 2
"""So many rounds in a row without a single step may follow losses; more, and the trainers themselves cannot work."""
_MAX_EVALUATIONS = 3
_RETURN_S = 5.0
"""So long may a trainer that is there take to dial a client that was started again."""


class RoundLoop:
    """Runs the outer rounds.

    Attributes:
        base: hash of the record on top of which the round is trained.
    """

    def __init__(
        self,
        *,
        config: Config,
        log_dir: Path,
        endpoint: Endpoint,
        coordinator: RoundCoordinator,
        membership: Membership,
        slots: TrainerSlots,
        trainers: TrainerPool,
        reports: Reports,
        divergence: Divergence,
        data: DataLink,
        reassignment: Reassignment,
        ledger: Ledger,
        saved: Saved,
        save: Callable[[RoundPlan | None], None],
        expected_servers: int,
        succeeds: bool = False,
        patient: bool = False,
        stages: StageWatch,
        boundary: BoundaryWatch,
        before_close: Callable[[], Awaitable[None]],
        inheritance: Inheritance,
        checkpointing: Checkpointing,
    ) -> None:
        """Connect the parts; `run` does the work.

        Args:
            saved: how an earlier start of this client has left the run.
            save: puts down how things stand, in a round that nobody has heard of, or None at the end of all.
            expected_servers: servers to wait for before the first round, for at most `servers_timeout_s`.
            succeeds: other hosts' clients have begun the run, and are gone.
            patient: wait for them, or for one complete pipeline if there are 0, however long it takes.
            boundary: says when the trainers of a round are waited for no longer.
            before_close: returns when a round may be ended.
        """
        self._config = config
        self._log_dir = log_dir
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._membership = membership
        self._slots, self._trainers = slots, trainers
        self._reports = reports
        self._divergence = divergence
        self._stages, self._boundary, self._before_close = stages, boundary, before_close
        self._inheritance, self._checkpointing = inheritance, checkpointing
        self._data = data
        self._reassignment = reassignment
        self._ledger = ledger
        self._expected_servers = expected_servers
        self._succeeds = succeeds
        self._patient = patient
        self._speeds: tuple[float, ...] = () if saved.plan is None else saved.plan.speeds
        self._left = saved.plan
        self.base = saved.base
        self._save = save
        self._homes = Homes(
            num_stages=config.num_stages,
            endpoint=endpoint,
            coordinator=coordinator,
            membership=membership,
            trainers=slots,
            reassignment=reassignment,
        )

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the current round."""
        return len(self._homes.pipelines)

    def slots_of(self, peer: PeerId) -> frozenset[int]:
        """Return the slots whose home pipeline runs over a replica."""
        pipelines = self._homes.pipelines or (() if self._left is None else self._left.pipelines)
        return frozenset(pipeline.slot for pipeline in pipelines if peer in pipeline.peers)

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
            standing = self._coordinator.standing
            if await write_last(standing, self._log_dir, self._ledger) and standing is not None:
                self._note(standing, None)

    async def _run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._homes.follow_view)
            tasks.start_soon(self._trainers.run)
            tasks.start_soon(self._reassignment.run, self.update_trainers)
            tasks.start_soon(look_for_servers, self._membership, self._stages)
            expected = 0 if self._left is not None else self._expected_servers
            await wait_for_servers(
                self._membership,
                self._config,
                self._ledger,
                expected,
                patient=self._patient,
                on_gap=self._coordinator.stand,
            )
            if not expected and self._left is None:
                await settled(self._membership)
            leading = await lead(self._coordinator, self._membership, self._config, patient=self._patient)
            if self._left is None and self.base:
                await all_hold(self._coordinator, self._membership, self._config)
            if self._left is None and not self._succeeds:
                await self._reassignment.place()
            goes_on = is_where_it_was(self._left, self.base, leading, succeeds=self._succeeds)
            while not await self._train_all(leading, goes_on):
                leading, goes_on = await self._coordinator.leading(), False
            await mirrored(self._coordinator, self._ledger)
            self._save(None)
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
            await self._evaluate_last(round, left)
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
        await self._recorded(outcome, plan.begun_s)
        return None

    async def _succeed(self, leading: Leading) -> RoundPlan | None:
        """Know what the record says that stands, and end the round after it as it is; raises as `_recorded` does."""
        self._homes.pipelines = ()
        hashes = await inherit(leading, self._log_dir, self._slots, self._data)
        self._ledger.note(RunTakenOver(leading.base_round, len(leading.holders), hashes))
        if leading.base_round < self._config.diloco.outer_steps:
            await self._close(leading.base_round + 1, None)

    async def _evaluate_last(self, round: int, left: RoundPlan | None) -> None:
        """Evaluate the last record; again, with new trainers, if some were lost with their shares."""
        first = self._config.diloco.total_steps
        for _ in range(_MAX_EVALUATIONS):
            await self._train(round, StepRange(first, first), left)
            left = None
            if not self._ledger.totals.num_holdout or round - 1 in self._reports.progress.eval_losses:
                return
            self._ledger.note(EvaluationIncomplete(round - 1))

    async def _round(self, round: int, left: RoundPlan | None) -> None:
        begun_s = self._ledger.run_s() if left is None else left.begun_s
        numbers = self._config.diloco.steps_of(round)
        await self._train(round, StepRange(numbers.start, numbers.stop) if left is None else left.steps, left)
        await self._close(round, begun_s)

    async def _close(self, round: int, begun_s: float | None) -> None:
        """End the round and act on its record; raises as `_recorded` does."""
        await self._before_close()
        slots = {peer: pipeline.slot for pipeline in self._homes.pipelines for peer in pipeline.peers}
        within_s = None if self._config.run.deterministic else self._config.diloco.averaging_timeout_s
        closed_s = self._ledger.run_s()
        self._coordinator.close_round(
            round, slots, self._slots.lowest, within_s, keep=self._checkpointing.is_due(round)
        )
        await self._recorded(await self._finished(round), begun_s, closed_s)

    async def _train(self, round: int, steps: StepRange, left: RoundPlan | None) -> None:
        """Let the trainers evaluate what stands, where that is due, and do their steps; returns at the boundary."""
        if left is None:
            await self._begin(round, steps)
        else:
            await self._adopt(left)
        progress, shares = self._reports.progress, self._evaluation_shares(round - 1)

        def go_on(slot: int, rest: StepRange) -> None:
            has_share = progress.has_share(round - 1, slot)
            self._start(round, slot, rest, None if has_share else shares[slot])

        slots = frozenset(pipeline.slot for pipeline in self._homes.pipelines)
        named, steady = (self._homes.named, self._coordinator.holders or ()) if left is None else (None, ())
        async with self._trainers.training(round, slots, steps, named=named, steady=steady, go_on=go_on):
            await self._boundary.reached(round, slots)

    async def _adopt(self, plan: RoundPlan) -> None:
        """Take over the trainers of a round that an earlier start of this client has begun."""
        await self._trainers.returned(_RETURN_S)
        if plan.steps:
            # The data server knows of those that are lost from now on only what is released.
            has_dead = self._slots.generations != plan.generations
            self._data.resume(plan.round, len(plan.pipelines), plan.steps, plan.speeds, has_dead=has_dead)
        self.update_trainers()

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
        self._save(RoundPlan(round, steps, self._homes.pipelines, generations, self._ledger.run_s(), self._speeds))
        if steps:
            self._data.plan(round, len(self._homes.pipelines), steps, self._speeds)
        for slot, share in enumerate(self._evaluation_shares(round - 1)):
            self._start(round, slot, steps, share)

    def _start(self, round: int, slot: int, steps: StepRange, evaluation: Evaluation | None) -> None:
        hop = self._slots.present.get(slot)
        if hop is None:
            return
        self._endpoint.post(
            hop.peer,
            StartRound(
                round=round,
                slot=slot,
                num_slots=len(self._homes.pipelines),
                steps=steps,
                path=self._homes.pipelines[slot].path,
                replicas=self._homes.name_replicas(slot),
                evaluation=evaluation,
                base=self.base,
            ),
        )

    def _evaluation_shares(self, base_round: int) -> list[Evaluation | None]:
        is_evaluated = self._config.run.evaluates(base_round, self._config.diloco.outer_steps)
        num_samples = self._ledger.totals.num_holdout if is_evaluated else 0
        return evaluation_shares(base_round, num_samples, len(self._homes.pipelines), self._speeds)

    async def _finished(self, round: int) -> RoundOutcome:
        """Wait for the record, as long as it takes: for a stage that nobody serves any more, for servers of it."""
        while True:
            with anyio.move_on_after(self._config.diloco.averaging_timeout_s):
                return await self._coordinator.finish_round(round)
            if not self._stages.missing:
                waited_s = self._config.diloco.averaging_timeout_s
                self._ledger.note(RoundSlow(round, waited_s))

    async def _recorded(self, outcome: RoundOutcome, begun_s: float | None, closed_s: float | None = None) -> None:
        """Write the record down and act on it.

        Args:
            begun_s: when this client has begun the round, in the time of the run; None: it has not.
            closed_s: when it has ended the round, likewise.

        Raises:
            ControlError: too many rounds in a row have trained nothing.
            TrainingDiverged: too many rounds in a row have only skipped steps.
            StorageError: it cannot be written.
        """
        record = outcome.record
        self._checkpointing.recorded(record)
        # It is forced to the disk, which may take long; the event loop has connections to keep.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(write_round, self._log_dir, record, outcome.signed)
        self._note(outcome, begun_s, closed_s)
        await self._count_costs(record)
        self._data.record(record.round, tuple(sorted((*record.samples, *record.skipped))))
        self._homes.holders = outcome.holders
        if record.round < self._config.diloco.outer_steps:
            self._reassignment.recorded(outcome.holders, record.round)
        self._divergence.round_over(*(sum(map(len, ranges)) for ranges in (record.samples, record.skipped)))
        idle_rounds = self._ledger.totals.idle_rounds
        if idle_rounds > _MAX_IDLE_ROUNDS:
            reason = self._reports.refusal or "see the trainers' logs"
            raise ControlError(f"{idle_rounds} rounds have passed without a step: {reason}")

    async def _count_costs(self, record: Record) -> None:
        """Of what was lost, note what it has cost; raises as `audit.lost_in` does."""
        if self._ledger.totals.incidents.wants_costs:
            lost = await anyio.to_thread.run_sync(lost_in, self._log_dir, record)
            self._ledger.note(StepsLost(record.round, lost))

    def _note(self, outcome: RoundOutcome, begun_s: float | None, closed_s: float | None = None) -> None:
        """A record is on the disk."""
        now_s = self._ledger.run_s()
        duration_s = None if begun_s is None else now_s - begun_s
        averaging_s = None if closed_s is None else now_s - closed_s
        if averaging_s is not None:
            self._phase("average", averaging_s)
            if duration_s is not None:
                self._phase("train", duration_s - averaging_s)
        record, progress = outcome.record, self._reports.progress
        self._reports.round_over(record.round)
        loss = progress.round_loss
        self._ledger.note(
            RoundRecorded(
                round=record.round,
                loss=loss,
                hashes=parameters_of(record),
                trained=bool(record.samples or record.skipped),
                sent_bytes=dict(outcome.sent_bytes),
                duration_s=duration_s,
                averaging_s=averaging_s,
                samples_before=count(record.recorded),
                curve=progress.round_curve,
            )
        )
        if loss is not None:
            self._reports.post({"loss/round": loss, "samples": float(progress.samples)})

    def _phase(self, phase: str, duration_s: float) -> None:
        self._endpoint.metrics.histogram("round.phase_seconds", phase=phase).observe(duration_s)

    def update_trainers(self) -> None:
        """Tell every trainer of the round which replicas it may use now; to be called when these have changed."""
        self._homes.tell_trainers()

    def overtaken(self) -> None:
        """Another chain of records stands: its replicas are nothing for trainers that are in the round of this one."""
        self._homes.pipelines = ()
