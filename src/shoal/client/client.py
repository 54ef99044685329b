"""The parts of a client, put together: what the role's process runs, and a cluster in one process as well.

endpoint -> Watch, TrainerPool, Reports, RoundCoordinator, Feed
membership -> RunDriver -> RoundCoordinator, trainers, data server
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from shoal.averaging.audit import audit
from shoal.averaging.contents import Contents
from shoal.averaging.coordinator import CoordinatorEvent, RoundCoordinator
from shoal.averaging.journal import Genesis, keep_steps
from shoal.averaging.signing import Signer
from shoal.averaging.stage_fetch import StageFetch
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.checkpoints import CheckpointCounts, Checkpointing, LastCheckpoint
from shoal.client.counters import CounterTotals
from shoal.client.data_link import DataLink
from shoal.client.diary import Diary
from shoal.client.divergence import Divergence
from shoal.client.homes import Homes
from shoal.client.inheritance import Inheritance
from shoal.client.keeping import Keeping
from shoal.client.ledger import Ledger
from shoal.client.model_export import ModelExport
from shoal.client.needed_files import NeededFiles
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.client.round_begin import RoundBegin
from shoal.client.round_records import RoundRecords, write_beginning
from shoal.client.run_driver import ClientFacts, RunDriver
from shoal.client.run_status import StatusAnswers
from shoal.client.saving import Saving
from shoal.client.stage_watch import StageWatch, Standstill
from shoal.client.steering import Pausing, Steering
from shoal.client.succession import Succession, TurnTaken
from shoal.client.summary import build_summary, costs_of
from shoal.client.trainers import TrainerPool
from shoal.client.troubles import Troubles
from shoal.client.watch import Watch
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.control.membership import Membership
from shoal.control.run_question import RunTeller
from shoal.data.feed import Feed
from shoal.events.incidents import RecordUnread, StepsUncounted
from shoal.events.run import ClientResumed
from shoal.ids import PeerId
from shoal.pipeline.role_hooks import NO_HOOKS, RoleHooks
from shoal.runtime.hardware import machine_type, program_versions
from shoal.runtime.launcher_messages import Adopt, Adoption, Launcher
from shoal.runtime.patient_thread import run_in_thread
from shoal.swarm.client_turn import ClientTurn
from shoal.swarm.codec_rule import CodecRule
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import GENERATIONS_APART, Logs, genesis_hash
from shoal.swarm.round_effects import Deposed, Overtaken
from shoal.swarm.round_settings import RoundSettings
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import RunRules
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop, StepRange

TRAINER_START_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a client's part of a run begins.

    Attributes:
        expected_servers: are waited for before the first round, for at most `servers_timeout_s`.
        succeeds: clients of other hosts have begun the run; this one takes it over when they are gone.
        patient: wait without a limit for the servers, or for one complete pipeline if `expected_servers` is 0; and for
            one that can compute a step which all others refuse.
    """

    expected_servers: int
    succeeds: bool = False
    patient: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRun:
    """A run, and how a client of this host takes part in it.

    Attributes:
        log_dir: where records and step logs are written.
        data_server: of this host; it runs already.
        diary: what an earlier start of this client has left, and where this one writes.
        checkpoint: from which the run is resumed, as the diary says.
    """

    config: Config
    run_id: str
    log_dir: Path
    data_server: Hop
    monitor: Hop
    diary: Diary
    beginning: Beginning
    checkpoint: StoredCheckpoint | None = None


class Client:
    """Trains a run from its first round to its last, with the servers of a membership.

    Attributes:
        ledger: what has happened, and what it comes to.
        model: what is left of it when the run ends.
        turn_taken: what begins when the run is this client's, and not that of a client before it.
    """

    def __init__(
        self,
        run: ClientRun,
        *,
        signer: Signer,
        endpoint: Endpoint,
        membership: Membership,
        launcher: Launcher,
        ledger: Ledger,
        clock: Clock,
        unwanted: Callable[[], None] | None = None,
        hooks: RoleHooks = NO_HOOKS,
    ) -> None:
        """Connect the parts.

        Args:
            signer: signs the records; of the same peer as `endpoint`.
            endpoint: `run` takes its events.
            unwanted: has all roles of this host end, since a user wants it; None: only this client stops.
        """
        config, run_id, log_dir, diary = run.config, run.run_id, run.log_dir, run.diary
        saved, checkpoint, num_stages = diary.saved, run.checkpoint, config.num_stages
        self._config, self._run_id, self._log_dir = config, run_id, log_dir
        self._endpoint, self._membership = endpoint, membership
        self._diary, self._launcher, self._clock = diary, launcher, clock
        self.ledger = ledger
        self._feed = Feed(
            endpoint=endpoint, data_server=run.data_server, trainer=-1, generation=diary.generation, clock=clock
        )
        self._needed = NeededFiles(ledger, clock)
        self._hooks = hooks
        succeeds = run.beginning.succeeds
        self.slots = TrainerSlots(start_timeout_s=TRAINER_START_TIMEOUT_S, above=GENERATIONS_APART if succeeds else 0)
        turn = ClientTurn(endpoint.peer_id, run_id)
        self._machine = RunClient(
            run_rules(config, run.beginning),
            self.slots,
            ledger.totals.time,
            turn=turn if succeeds and saved.plan is None and not saved.is_finished else None,
            left=saved.plan,
            base=saved.base,
        )
        self._troubles = Troubles(ledger, membership, config.network.shown_host_name, clock)
        shared = shared_configuration(config)
        self._coordinator = RoundCoordinator(
            endpoint=endpoint,
            signer=signer,
            # Not the diary's count: that may be lost with the machine, and two starts must never share a ballot.
            generation=secrets.randbits(31),
            settings=RoundSettings(
                run_id=run_id,
                num_stages=num_stages,
                genesis=genesis_hash(run_id, config.run.seed, shared, signer.authority),
                stage_timeout_s=config.diloco.averaging_timeout_s,
                lost_state_after_s=config.health.lost_state_after_s,
                max_gradient_ratio=config.diloco.max_pseudo_gradient_ratio,
                cuts=CutRule.of(config.diloco),
                codecs=CodecRule.of(config.diloco),
            ),
            clock=clock,
            journal=self._keep_steps,
            recorded=saved.recorded,
            ballot_number=saved.ballot_number,
            known=saved.resumed,
            on_event=self._round_event,
        )
        self._succession = Succession(
            self._machine,
            turn,
            run_id=run_id,
            endpoint=endpoint,
            membership=membership,
            clock=clock,
            coordinator=self._coordinator,
            diary=diary,
            succeeds=succeeds,
        )
        self.teller = RunTeller(endpoint, shared, lambda: endpoint.peer_id if self.has_turn else None)
        self._reassignment = Reassignment(
            endpoint=endpoint,
            coordinator=self._coordinator,
            membership=membership,
            clock=clock,
            num_stages=num_stages,
            ledger=ledger,
        )
        self._homes = Homes(
            machine=self._machine,
            num_stages=num_stages,
            endpoint=endpoint,
            coordinator=self._coordinator,
            membership=membership,
            trainers=self.slots,
            reassignment=self._reassignment,
            employ=signer.employ,
            left=() if saved.plan is None else saved.plan.pipelines,
        )
        self._watch = Watch(
            endpoint=endpoint,
            membership=membership,
            trainers=self.slots,
            homes=self._homes,
            reassignment=self._reassignment,
            data_server=run.data_server.peer,
            ledger=ledger,
            clock=clock,
            host=config.network.shown_host_name,
        )
        self.reports = Reports(
            endpoint=endpoint,
            monitor=run.monitor,
            trainers=self.slots,
            homes=self._homes,
            membership=membership,
            num_stages=num_stages,
            divergence=Divergence(config.diloco),
            clock=clock,
            ledger=ledger,
        )
        ledger.pass_on = self.reports.pass_on_event
        self.counters = CounterTotals(
            endpoint,
            clock,
            ledger,
            reports=self.reports,
            membership=membership,
            troubles=self._troubles,
            host=config.network.shown_host_name,
        )
        self._data = DataLink(
            endpoint=endpoint,
            data_server=run.data_server,
            clock=clock,
            ledger=ledger,
            trainers=self.slots,
            launcher=launcher,
        )
        self._trainers = TrainerPool(
            slots=self.slots,
            endpoint=endpoint,
            launcher=launcher,
            membership=membership,
            data=self._data,
            reports=self.reports,
            ledger=ledger,
            clock=clock,
        )
        self._stages = StageWatch(ledger, is_resumed=saved.plan is None and saved.resumed is not None)
        self._pausing = Pausing(ledger, self._data, self.reports)
        self._contents = Contents(endpoint, clock)
        self._fetch = StageFetch(self._contents, membership)
        self._keeping = Keeping(config, self._contents, self._coordinator, self._fetch, ledger, self._watch, checkpoint)
        self._inheritance = Inheritance(self._contents, ledger, checkpoint)
        self._checkpointing = Checkpointing(config, clock, membership)
        self._counts = CheckpointCounts(endpoint, membership, self._coordinator, ledger, log_dir)
        self._last_checkpoint = LastCheckpoint(endpoint, membership, self._coordinator, ledger, self._counts)
        saving = Saving(
            run_id=run_id,
            diary=diary,
            ledger=ledger,
            coordinator=self._coordinator,
            membership=membership,
            data=self._data,
            counters=self.counters,
            counts=self._counts,
            needed=self._needed,
        )
        # What the counters' monitor writes is of who trains: not before.
        parts = (self._homes, self._trainers, self._reassignment, self._troubles, self.counters, self.reports)
        standstill = () if run.beginning.patient else (Standstill(self.reports, ledger),)
        self.turn_taken = TurnTaken((*parts, *standstill), self._feed, ledger)
        self.rounds = RunDriver(
            self._machine,
            ClientFacts(
                self._coordinator,
                membership,
                self._homes,
                self._reassignment,
                self._keeping,
                self._data,
                self.reports,
                ledger,
            ),
            succession=self._succession,
            membership=membership,
            reassignment=self._reassignment,
            trainers=self._trainers,
            begin=RoundBegin(
                self._machine,
                config=config,
                coordinator=self._coordinator,
                ledger=ledger,
                slots=self.slots,
                trainers=self._trainers,
                reports=self.reports,
                data=self._data,
                homes=self._homes,
                inheritance=self._inheritance,
                saving=saving,
                speeds=() if saved.plan is None else saved.plan.speeds,
            ),
            records=RoundRecords(
                config=config,
                log_dir=log_dir,
                needed=self._needed,
                coordinator=self._coordinator,
                ledger=ledger,
                slots=self.slots,
                reports=self.reports,
                data=self._data,
                homes=self._homes,
                reassignment=self._reassignment,
                checkpointing=self._checkpointing,
            ),
            ledger=ledger,
            saving=saving,
            turn_taken=self.turn_taken,
            changes=(
                membership.changed,
                self._succession.changed.wait,
                self._coordinator.changed,
                self._reassignment.moved.wait,
                self._trainers.changed.wait,
                self._data.changed.wait,
                self.reports.finished.wait,
                self.reports.refused_changed.wait,
                self._keeping.changed.wait,
                self._pausing.changed.wait,
            ),
        )
        self._until_stopped = anyio.CancelScope()
        self._steering = Steering(
            endpoint,
            ledger,
            self._pausing,
            self._checkpointing,
            self._succession,
            stop=self.stop if unwanted is None else unwanted,
        )
        deaths = diary.generation - saved.generation if saved.is_finished else 0
        self.model = ModelExport(config, run_id, log_dir, self._fetch, self._keeping, clock, ledger, deaths)
        begun_here = config.servers.threads, program_versions(), machine_type()
        self._genesis = Genesis(config.run.seed, signer.authority, shared, *begun_here)
        if diary.is_resumed:
            self._resume()

    @property
    def ends_run(self) -> bool:
        """Whether its end is that of the run."""
        return self._succession.ends_run

    @property
    def has_turn(self) -> bool:
        """Whether it has the run, and does not wait until a client of another host is gone."""
        return self._succession.has_turn

    async def run(self) -> None:
        """Train all rounds, of another host's run when it is this client's turn; in any case leave the model then.

        Raises:
            ShoalError: the run failed.
        """
        try:
            await self._run()
        finally:
            self.ledger.close()

    def stop(self) -> None:
        """Train no more; `run` returns when it has left the model."""
        self._until_stopped.cancel()

    async def _run(self) -> None:
        if self._diary.is_resumed and not self._diary.saved.is_finished:
            self._adopt(await self._launcher.request(Adopt()))
        async with anyio.create_task_group() as tasks:
            parts = (self._trainers, self.reports, self._counts, self._coordinator, self._reassignment)
            transfers = (self._fetch, self._contents, self._keeping, self._inheritance, self._last_checkpoint)
            asked = (self._data, self._feed, self.counters, self._succession, *transfers, self.teller, self._steering)
            seen = (self._membership, self.reports, self._stages, self._pausing, self.slots, self.counters.numbers)
            answers = StatusAnswers(self._endpoint, self._config, *seen, self.ledger.course, self._clock)
            handlers = self._hooks.handlers((*parts, *asked, answers))
            tasks.start_soon(dispatch, self._endpoint, handlers, self._found, self._watch.lost)
            tasks.start_soon(self._contents.run)
            async with self.model.left_at_the_end(self._succession, self._last_checkpoint):
                with self._until_stopped:
                    if not self._diary.is_resumed:
                        await write_beginning(self._genesis, self._log_dir, self.ledger, self._needed)
                    await self._train()
            tasks.cancel_scope.cancel()

    async def _train(self) -> None:
        if self._diary.saved.is_finished:
            self.turn_taken.event.set()
            return
        async with anyio.create_task_group() as tasks:
            for part in (self._coordinator, self._stages, self._data, self._feed, self._keeping):
                tasks.start_soon(part.run)
            tasks.start_soon(self._watch.run, self._coordinator)
            await self.rounds.run()
            tasks.cancel_scope.cancel()

    def _found(self, peer: PeerId) -> None:
        self._membership.found(peer)
        self._watch.found(peer)
        self._succession.peer_up(peer)

    def _round_event(self, event: CoordinatorEvent) -> None:
        """Act on what happens to replicas between records."""
        self._stages.take(event)
        if isinstance(event, Deposed):
            self.rounds.deposed(event.highest)
        if isinstance(event, Overtaken):
            # Its replicas are nothing for trainers that are in the round of this chain.
            self.rounds.overtaken()
        self._homes.tell_trainers()

    async def summary(self, exit_reason: str) -> dict[str, Any]:
        """Return what was reached so far, as `summary.json` has it.

        Args:
            exit_reason: "done", "failed" or "interrupted".
        """
        self.counters.settle()
        totals = self.ledger.totals
        found = await run_in_thread(partial(audit, self._log_dir, totals.num_train, is_strict=False))
        for round, reason in sorted(found.unread_records.items()):
            self.ledger.note(RecordUnread(round, reason))
        for round, reason in sorted(found.unread.items()):
            self.ledger.note(StepsUncounted(round, reason))
        costs = costs_of(totals, found)
        self.ledger.end(costs.steps_lost)
        return build_summary(
            config=self._config,
            run_id=self._run_id,
            totals=totals,
            paused_s=totals.time.all_pauses_s(self.ledger.now_s()),
            audit=found,
            costs=costs,
            view=self._membership.view,
            model=self.model.left,
            exit_reason=exit_reason,
        )

    async def _keep_steps(self, round: int, digest: str, logs: Logs) -> None:
        # They are forced to the disk, which may take long; the event loop has connections to keep.
        await self._needed.written(lambda: run_in_thread(keep_steps, self._log_dir, round, digest, logs))

    def _resume(self) -> None:
        """Go on where an earlier start was; the ledger has its totals."""
        saved = self._diary.saved
        round, pipelines = (0, ()) if saved.plan is None else (saved.plan.round, saved.plan.pipelines)
        self.reports.resume(round, pipelines)
        base_round = self._coordinator.round - 1 if saved.plan is None else round - 1
        self._data.know(base_round, saved.recorded, saved.chain, saved.marks)
        # The earlier start may have ended between noting a pause, or its end, and telling of it.
        self._data.pause(paused=self._pausing.is_paused)
        # The registry takes a moment to be read; it corrects this as soon as it is.
        self._membership.update(saved.servers)
        self.ledger.note(ClientResumed(self._diary.generation, round, len(self.ledger.earlier)))

    def _adopt(self, adoption: Adoption) -> None:
        """Take over what the launcher still runs, and note what broke while there was no client."""
        plan = self._diary.saved.plan
        known = {} if plan is None else plan.generations
        self.slots.adopt({**known, **adoption.generations}, adoption.running)
        if plan is None and (resumed := self._coordinator.standing) is not None:
            # Steps that were committed after the checkpoint are none any more: their trainers have none of its names.
            self.slots.begin_above(resumed.record.generations, GENERATIONS_APART)
        slots = () if plan is None else tuple(pipeline.slot for pipeline in plan.pipelines)
        self._watch.processes_ended(adoption.lost, slots)


def run_rules(config: Config, beginning: Beginning) -> RunRules:
    """Return what a run is for who leads it."""
    diloco = config.diloco

    def steps_of(round: int) -> StepRange:
        numbers = diloco.steps_of(round)
        return StepRange(numbers.start, numbers.stop)

    return RunRules(
        num_stages=config.num_stages,
        num_rounds=diloco.outer_steps,
        total_steps=diloco.total_steps,
        steps_of=steps_of,
        expected_servers=beginning.expected_servers,
        servers_timeout_s=config.servers_timeout_s,
        averaging_timeout_s=diloco.averaging_timeout_s,
        first_deadline_s=math.inf if config.run.deterministic else config.run.first_deadline_s,
        evaluates=lambda round: config.run.evaluates(round - 1, diloco.outer_steps),
        succeeds=beginning.succeeds,
        patient=beginning.patient,
    )
