"""What the trainers report: noted in the ledger, passed on to the monitor, and told to the slots."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import anyio

from shoal.client.divergence import ALONE_IN_A_ROW, Divergence, SkipsAlone
from shoal.client.homes import Homes
from shoal.client.ledger import Ledger
from shoal.client.progress import Progress
from shoal.client.shares import Shares
from shoal.clock import Clock, Deadline, wait_for_tick
from shoal.control.membership import Membership
from shoal.events.base import Event
from shoal.events.run import (
    PipelineSkips,
    RoundShared,
    ShareEvaluated,
    StepReported,
    TrainerFinished,
    TrainingDiverging,
)
from shoal.events.trainers import ReportOfStranger, StepRefused, TrainerWithoutPath
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.runtime.waking import Signal
from shoal.swarm.routing import Pipeline
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.telemetry.rows import NumbersSoFar
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop, RouterReport
from shoal.wire.messages.control import (
    MAX_NOTED_CHARS,
    EvalReport,
    Metrics,
    Noted,
    PeerMetrics,
    StepReport,
    TrainerDone,
    TrainerStuck,
)

logger = logging.getLogger(__name__)

MAX_FIGURES = 64
"""Of a step, that its servers name beside the loss; a family has a few."""
_MONITOR_RESTS_S = 1.0
"""How long a monitor that was lost gets no numbers: it may be gone for good, and each number would dial it."""
STEPS_TOGETHER_S = 1.0
"""For so long the numbers of steps are told together, as a row of the monitor has them: what it does is not to grow
with their rate."""


@dataclass(kw_only=True, eq=False, repr=False)
class Reports:
    """The client's ear for its trainers. A `transport.dispatch.Handler`.

    Attributes:
        trainers: only their reports count, and tell it who is done.
        homes: tell a trainer that finds no complete path through the stages who may be used.
        shares: what each pipeline has trained in the round.
        finished: notified when nothing more is expected of another slot.
    """

    endpoint: Endpoint
    monitor: Hop
    trainers: TrainerSlots
    homes: Homes
    membership: Membership
    num_stages: int
    divergence: Divergence
    clock: Clock
    ledger: Ledger
    shares: Shares = field(default_factory=Shares, init=False)
    finished: Signal = field(default_factory=Signal, init=False)
    _skips_alone: SkipsAlone = field(default_factory=SkipsAlone)
    _monitor_lost: Signal = field(default_factory=Signal)
    _round: int = 0
    _steps: NumbersSoFar = field(default_factory=NumbersSoFar)
    _steps_held: Signal = field(default_factory=Signal)
    _refusals: dict[int, str] = field(default_factory=dict[int, str])
    # Slots that have found no server for their step since the last one.
    _waiting: set[int] = field(default_factory=set[int])
    # Those of them at whose step the model fails, wherever it is computed, since the last step of any slot, with the
    # generation of the trainer that says so.
    _failing: dict[int, int] = field(default_factory=dict[int, int])
    refused_since_s: float | None = field(default=None, init=False)
    refused_changed: Signal = field(default_factory=Signal, init=False)

    def __post_init__(self) -> None:
        self._gate = FloodGate(logger, self.clock)
        self._monitor_rests = self._steps_rest = Deadline.after(self.clock, 0.0)
        self.endpoint.introduce(self.monitor)

    def receive(self, event: Received) -> bool:
        """Take a trainer's report."""
        message = event.message
        if not isinstance(message, StepReport | EvalReport | TrainerDone | TrainerStuck):
            return False
        if self.trainers.slot_of(event.peer) != message.slot:
            self._gate.emit(ReportOfStranger(event.peer, message.slot), event.peer)
            return True
        match message:
            case StepReport():
                self._step(message)
            case EvalReport():
                self._evaluated(message)
            case TrainerDone():
                self._trainer_done(message)
            case TrainerStuck():
                self._stuck(message)
                self.homes.tell_trainers()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """What a lost trainer has reported stands; a lost monitor is not dialled again for each number."""
        if peer == self.monitor.peer:
            self._monitor_rests = Deadline.after(self.clock, _MONITOR_RESTS_S)
            self._monitor_lost.notify()

    @property
    def refusal(self) -> str:
        """Why servers refuse a step that is standing; empty: they refuse none."""
        return next(iter(self._refusals.values()), "")

    @property
    def is_refused(self) -> bool:
        """Whether all trainers that have something left wait for a server that takes their step."""
        present = self.trainers.present.keys() & {pipeline.slot for pipeline in self.homes.pipelines}
        left = [slot for slot in present if not self.trainers.is_done(slot)]
        return bool(left) and self._waiting.issuperset(left)

    @property
    def mistake(self) -> str:
        """What the model of the user's own raises at the steps of all slots that have something left, wherever they are
        computed; empty: some may be computed, perhaps by a trainer that has yet to come."""
        left = [pipeline.slot for pipeline in self.homes.pipelines if not self.trainers.is_done(pipeline.slot)]
        generations = self.trainers.generations
        fails = bool(left) and all(self._failing.get(slot) == generations.get(slot, -1) for slot in left)
        return self._refusals[left[0]] if fails else ""

    @property
    def progress(self) -> Progress:
        """What the trainers have achieved so far."""
        return self.ledger.totals.progress

    def begin_round(self, round: int, pipelines: Sequence[Pipeline]) -> None:
        """Forget who was done in the round before, and who has waited."""
        self._round = round
        self._refusals.clear()
        self._waiting.clear()
        self._failing.clear()
        self._stand_since(None)
        self.shares.begin_round(pipelines)
        self.trainers.nothing_done()

    def resume(self, round: int, pipelines: Sequence[Pipeline]) -> None:
        """Go on in a round in which an earlier start of this client was."""
        self.begin_round(round, pipelines)
        for event in self.ledger.earlier:
            self._take(event)

    def phase_took(self, phase: str, duration_s: float) -> None:
        """Count how long a phase of a round has taken."""
        self.endpoint.metrics.histogram("round.phase_seconds", phase=phase).observe(duration_s)

    def round_over(self, number: int) -> None:
        """Say how a round was shared between the pipelines. That it is over is as good as a step."""
        if self.refused_since_s is not None:
            self._stand_since(self.ledger.run_s())
        shared = self.shares.of_round()
        samples = dict(sorted(shared.samples.items()))
        speeds = {slot: round(speed, 1) for slot, speed in sorted(shared.samples_per_s.items())}
        self.ledger.note(RoundShared(number, samples, speeds, shared.waited_s))
        total = sum(samples.values())
        if len(samples) > 1:
            self.post({f"share/{slot}": num / total for slot, num in samples.items()})

    def last_number(self, slot: int) -> int:
        """Return the number of the last step that a slot's trainers have reported; -1 before the first."""
        return self.ledger.totals.last_numbers.get(slot, -1)

    def post(self, values: Mapping[str, float]) -> None:
        """Send numbers about the run to the monitor, if it is there, after those of the steps until now."""
        self._tell_steps()
        self._send(values, 1)

    def pass_on(self, numbers: PeerMetrics) -> None:
        """Send a peer's own numbers to the monitor, if it is there."""
        if self._monitor_rests.expired():
            self.endpoint.post(self.monitor.peer, numbers)

    def pass_on_event(self, line: str) -> None:
        """Send what was noted to the monitor, if it is there; it reads what it has missed in the file."""
        if self._monitor_rests.expired() and len(line) <= MAX_NOTED_CHARS:
            self.endpoint.post(self.monitor.peer, Noted(line))

    def tell_swarm(self) -> None:
        """Send the monitor how the swarm is now."""
        self.post(self._swarm_numbers())

    async def run(self) -> None:
        """Tell the monitor who is there, also while no step is committed, and what steps have come to, until cancelled.

        Whenever that changes; and after the monitor was lost, since the next one knows nothing.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_monitor)
            tasks.start_soon(self._follow_steps)
            try:
                while True:
                    self.tell_swarm()
                    await self.membership.changed()
            finally:
                self._tell_steps()

    async def _follow_monitor(self) -> None:
        while True:
            await self._monitor_lost.take()
            await self.clock.sleep_s(self._monitor_rests.remaining_s())
            self.tell_swarm()

    async def _follow_steps(self) -> None:
        while True:
            await self._steps_held.take()
            await wait_for_tick(self.clock, self._steps_rest.remaining_s())
            self._tell_steps()

    def _tell_steps(self) -> None:
        """Send the monitor what the steps have come to that it has not been told of."""
        if not self._steps.steps:
            return
        together, self._steps = self._steps, NumbersSoFar()
        self._steps_rest = Deadline.after(self.clock, STEPS_TOGETHER_S)
        self._send(together.last | together.means | self._swarm_numbers(), together.steps)

    def _send(self, values: Mapping[str, float], steps: int) -> None:
        if self._monitor_rests.expired():
            numbers = Metrics("client", self.endpoint.peer_id, self.progress.round, dict(values), steps)
            self.endpoint.post(self.monitor.peer, numbers)

    def _swarm_numbers(self) -> dict[str, float]:
        """Return the numbers of the swarm as it is now, by name as in `monitor.status.Status`."""
        view, num_stages = self.membership.view, self.num_stages
        replicas = view.num_replicas(num_stages)
        return {
            # Those of the round, as far as each of their stages has a server.
            "pipelines": float(min(len(self.homes.pipelines), *replicas)),
            # The data server and the trainers announce themselves to nobody but this client.
            "alive_peers": float(view.num_peers + len(self.trainers.present) + 1),
            "missing_stages": float(len(view.missing_stages(num_stages))),
            "paused": float(self.ledger.totals.time.is_paused),
            **{f"replicas/{stage}": float(number) for stage, number in enumerate(replicas)},
        }

    def _stuck(self, message: TrainerStuck) -> None:
        self._waiting.add(message.slot)
        if message.is_model and message.refusal:
            self._failing[message.slot] = self.trainers.generations[message.slot]
        else:
            self._failing.pop(message.slot, None)
        self.refused_changed.notify()
        if not message.refusal:
            self.ledger.note(TrainerWithoutPath(message.slot, message.stages))
            return
        refusal = " ".join(message.refusal.split())
        if self._refusals.get(message.slot) != refusal:  # each further attempt would say the same
            self._refusals[message.slot] = refusal
            if self.refused_since_s is None:
                self._stand_since(self.ledger.run_s())
            self.ledger.note(StepRefused(message.slot, refusal))

    def _stand_since(self, since_s: float | None) -> None:
        self.refused_since_s = since_s
        self.refused_changed.notify()

    def _step(self, report: StepReport) -> None:
        self._refusals.pop(report.slot, None)
        # Its servers may be those at which another trainer's step has failed: that one tries again soon.
        self._failing.clear()
        if report.slot in self._waiting:
            self._waiting.discard(report.slot)
            self.refused_changed.notify()
        if self.refused_since_s is not None:
            # Another trainer may still wait, but the run goes on.
            self._stand_since(self.ledger.run_s() if self._refusals else None)
        if report.key.number <= self.last_number(report.slot):
            return  # its trainer cannot know that it was counted before the client was started again
        routers = [each for each in report.routers if not each.figure]
        # A server may invent names, and the monitor takes so many numbers at a time.
        figures = dict(islice(((each.figure, each.loss) for each in report.routers if each.figure), MAX_FIGURES))
        self._note(
            StepReported(
                slot=report.slot,
                number=report.key.number,
                attempt=report.key.attempt,
                num_samples=report.num_samples,
                num_targets=report.num_targets,
                loss=report.loss,
                skipped=report.skipped,
                duration_s=report.duration_s,
                at_s=report.at_s,
                router_losses=tuple(router.loss for router in routers),
                router_load_cvs=tuple(router.load_cv for router in routers),
                figures=figures,
            )
        )
        if (warning := self.divergence.step(report.skipped)) is not None:
            self.ledger.note(TrainingDiverging(warning))
        if self._skips_alone.step(report.slot, skipped=report.skipped):
            self.ledger.note(PipelineSkips(report.slot, ALONE_IN_A_ROW, ", ".join(self._servers_of(report.slot))))
        progress = self.progress
        self._steps.add(
            {
                **figures,  # first: none takes the name of what is known here
                "step": float(progress.steps),
                "samples": float(progress.samples),
                "loss/train": report.loss,
                **_router_numbers(routers),
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "step_s": report.duration_s,
                "samples_per_s": progress.recent_samples_per_s(),
                "targets_per_s": progress.recent_targets_per_s(),
            }
        )
        if self._steps_rest.expired():
            self._tell_steps()
        else:
            self._steps_held.notify()

    def _servers_of(self, slot: int) -> list[str]:
        """Return what the home servers of a slot are called."""
        homes = [pipeline.peers for pipeline in self.homes.pipelines if pipeline.slot == slot]
        return [self.membership.view.name_of(peer) for peers in homes for peer in peers]

    def _evaluated(self, report: EvalReport) -> None:
        losses = self.progress.eval_losses
        if report.base_round in losses:
            return
        share = ShareEvaluated(report.slot, report.base_round, report.loss_sum, report.num_samples, report.num_targets)
        self._note(share)
        if report.base_round in losses:
            self.post({"loss/eval": losses[report.base_round], "samples": float(self.progress.samples)})

    def _trainer_done(self, report: TrainerDone) -> None:
        generation = self.trainers.generations[report.slot]
        self._note(TrainerFinished(report.slot, generation, report.round, report.sent_bytes))
        self.finished.notify()
        self.refused_changed.notify()

    def _note(self, event: Event) -> None:
        self.ledger.note(event)
        self._take(event)

    def _take(self, event: Event) -> None:
        """What only the round that is trained needs to know, and no total."""
        match event:
            case StepReported():
                self.shares.step(event)
            case TrainerFinished() if event.round == self._round:
                self.trainers.finish(event.slot)
            case _:
                pass


def _router_numbers(routers: Sequence[RouterReport]) -> dict[str, float]:
    """What metrics have of the layers with experts, see `monitor.status.Status`; nothing where there are none."""
    if not routers:
        return {}
    mean = sum(router.loss for router in routers) / len(routers)
    return {"loss/router": mean, "router/load_cv": max(router.load_cv for router in routers)}
