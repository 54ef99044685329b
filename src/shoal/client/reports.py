"""What the trainers report: counted in `Progress`, passed on to the monitor, and waited for by the round loop."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio

from shoal.client.diary import Event, SlotDone
from shoal.client.divergence import Divergence
from shoal.client.progress import Progress
from shoal.client.shares import Shares
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock, Deadline
from shoal.ids import PeerId
from shoal.swarm.routing import Pipeline
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import EvalReport, Metrics, StepReport, TrainerDone, TrainerStuck

logger = logging.getLogger(__name__)

_MONITOR_RESTS_S = 1.0
"""How long a monitor that was lost gets no numbers: it may be gone for good, and each number would dial it."""


class Reports:
    """The client's ear for its trainers. A `transport.dispatch.Handler`.

    Attributes:
        shares: what each pipeline has trained in the round.
        num_holdout: size of the held-out set; 0 until the data server has said it.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        monitor: Hop,
        trainers: TrainerPool,
        swarm_numbers: Callable[[], Mapping[str, float]],
        on_stuck: Callable[[TrainerStuck], None],
        divergence: Divergence,
        clock: Clock,
        note: Callable[[StepReport | EvalReport | SlotDone], None] = lambda _: None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Remember where numbers go.

        Args:
            trainers: only their reports count.
            swarm_numbers: returns what the view says now, by name as in `monitor.status.Status`.
            on_stuck: called when a trainer finds no complete path through the stages.
            notice: tells the user something that stays on the screen.
        """
        self.progress = Progress()
        self.shares = Shares()
        self.num_holdout = 0
        self._endpoint = endpoint
        self._monitor = monitor.peer
        self._trainers = trainers
        self._swarm_numbers = swarm_numbers
        self._on_stuck = on_stuck
        self._note = note
        self.divergence = divergence
        self._notice = notice
        self._clock = clock
        self._monitor_rests = Deadline.after(clock, 0.0)
        self._monitor_lost = anyio.Event()
        self._round = 0
        self._done: set[int] = set()
        self._last_number: dict[int, int] = {}
        self._changed = anyio.Event()
        endpoint.introduce(monitor)

    def receive(self, event: Received) -> bool:
        """Take a trainer's report."""
        message = event.message
        if not isinstance(message, StepReport | EvalReport | TrainerDone | TrainerStuck):
            return False
        if self._trainers.slot_of(event.peer) != message.slot:
            logger.warning("report.stranger", extra={"peer": event.peer, "slot": message.slot})
            return True
        match message:
            case StepReport():
                self._step(message)
            case EvalReport():
                self._evaluated(message)
            case TrainerDone():
                self._trainer_done(message)
            case TrainerStuck():
                logger.warning("trainer.stuck", extra={"slot": message.slot, "stages": message.stages})
                self._on_stuck(message)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """What a lost trainer has reported stands; a lost monitor is not dialled again for each number."""
        if peer == self._monitor:
            self._monitor_rests = Deadline.after(self._clock, _MONITOR_RESTS_S)
            self._monitor_lost.set()

    def resume(
        self,
        progress: Progress,
        last_numbers: Mapping[int, int],
        round: int,
        pipelines: Sequence[Pipeline],
        events: Iterable[Event],
        num_holdout: int,
    ) -> None:
        """Go on where an earlier start of this client was.

        Args:
            progress: as it was when the round began.
            last_numbers: as `last_number` was when the round began.
            events: counted since the round began.
        """
        self.progress, self.num_holdout, self._round = progress, num_holdout, round
        self._last_number = dict(last_numbers)
        self.shares.begin_round(pipelines)
        for event in events:
            match event:
                case StepReport():
                    self._count_step(event)
                case EvalReport():
                    progress.evaluated(event, num_holdout)
                case SlotDone(generation, report):
                    self._count_done(report, generation)
                case _:
                    pass

    @property
    def last_numbers(self) -> Mapping[int, int]:
        """The last step that each slot's trainers have reported."""
        return self._last_number

    def begin_round(self, round: int, pipelines: Sequence[Pipeline], *, trains: bool) -> None:
        """Forget who was done in the round before.

        Args:
            trains: False for the evaluation at the end, which is not a round.
        """
        self._round = round
        self.shares.begin_round(pipelines)
        if trains:
            self.progress.round = round
        self.progress.begin_evaluation(round - 1)
        self._done = set()

    def begin_anew(self) -> None:
        """The run goes on from a chain of records of others: steps have numbers again that were reported already, and
        what was evaluated was something else."""
        self._last_number.clear()
        self.progress.eval_losses.clear()

    def round_over(self, number: int) -> None:
        """Say how a round was shared between the pipelines."""
        shared = self.shares.of_round()
        logger.info(
            "round.shared",
            extra={
                "round": number,
                "samples": dict(sorted(shared.samples.items())),
                "samples_per_s": {slot: round(speed, 1) for slot, speed in sorted(shared.samples_per_s.items())},
                "waited_s": shared.waited_s,
            },
        )
        total = sum(shared.samples.values())
        if len(shared.samples) > 1:
            self.post({f"share/{slot}": num / total for slot, num in sorted(shared.samples.items())})

    async def all_done(self, slots: frozenset[int]) -> None:
        """Wait until these slots' trainers have done their steps, or are excused."""
        while not slots <= self._done:
            await self._changed.wait()

    def is_done(self, slot: int) -> bool:
        """Return whether nothing more is expected of a slot in this round."""
        return slot in self._done

    def excuse(self, slot: int) -> None:
        """Expect nothing more of a slot in this round: it has no trainer."""
        self._done.add(slot)
        self._notify()

    def last_number(self, slot: int) -> int:
        """Return the number of the last step that a slot's trainers have reported; -1 before the first."""
        return self._last_number.get(slot, -1)

    def post(self, values: Mapping[str, float]) -> None:
        """Send numbers about the run to the monitor, if it is there."""
        if self._monitor_rests.expired():
            numbers = Metrics("client", self._endpoint.peer_id, self.progress.round, dict(values))
            self._endpoint.post(self._monitor, numbers)

    async def follow(self, swarm_changed: Callable[[], Awaitable[object]]) -> None:
        """Tell the monitor who is there, also while no step is committed, until cancelled.

        Whenever that changes; and after the monitor was lost, since the next one knows nothing.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_monitor)
            while True:
                self.post(self._swarm_numbers())
                await swarm_changed()

    async def _follow_monitor(self) -> None:
        while True:
            await self._monitor_lost.wait()
            self._monitor_lost = anyio.Event()
            await self._clock.sleep_s(self._monitor_rests.remaining_s())
            self.post(self._swarm_numbers())

    def _step(self, report: StepReport) -> None:
        if report.key.number <= self.last_number(report.slot):
            return  # its trainer cannot know that it was counted before the client was started again
        progress = self.progress
        self._note(report)
        self._count_step(report)
        if (warning := self.divergence.step(report.skipped)) is not None:
            logger.warning("training.diverging", extra={"reason": warning})
            self._notice(warning)
        self.post(
            {
                "step": float(progress.steps),
                "samples": float(progress.samples),
                "loss/train": report.loss,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "step_s": report.duration_s,
                "samples_per_s": progress.recent_samples_per_s(),
                **self._swarm_numbers(),
            }
        )
        self._notify()

    def _count_step(self, report: StepReport) -> None:
        self.progress.step(report, report.at_s)
        self.shares.step(report)
        self._last_number[report.slot] = report.key.number

    def _evaluated(self, report: EvalReport) -> None:
        if report.base_round in self.progress.eval_losses:
            return
        self._note(report)
        loss = self.progress.evaluated(report, self.num_holdout)
        if loss is not None:
            logger.info("evaluation.done", extra={"base_round": report.base_round, "loss": loss})
            self.post({"loss/eval": loss, "samples": float(self.progress.samples)})

    def _trainer_done(self, report: TrainerDone) -> None:
        generation = self._trainers.generations[report.slot]
        self._note(SlotDone(generation, report))
        self._count_done(report, generation)
        self._notify()

    def _count_done(self, report: TrainerDone, generation: int) -> None:
        self.progress.done(report, generation)
        if report.round == self._round:
            self._done.add(report.slot)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
