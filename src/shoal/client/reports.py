"""What the trainers report: counted in `Progress`, passed on to the monitor, and waited for by the round loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import anyio

from shoal.client.progress import Progress
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import EvalReport, Metrics, StepReport, TrainerDone, TrainerStuck

logger = logging.getLogger(__name__)


class Reports:
    """The client's ear for its trainers. A `transport.dispatch.Handler`.

    Attributes:
        progress: the running totals.
        num_holdout: size of the held-out set, known once the data server has said it.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        monitor: Hop,
        trainers: TrainerPool,
        clock: Clock,
        swarm_numbers: Callable[[], Mapping[str, float]],
        on_stuck: Callable[[TrainerStuck], None],
    ) -> None:
        """Remember where numbers go.

        Args:
            endpoint: of the client.
            monitor: gets the numbers.
            trainers: whose reports are believed.
            clock: for rates.
            swarm_numbers: what the view says now, by name.
            on_stuck: told when a trainer cannot put a path together.
        """
        self.progress = Progress()
        self.num_holdout = 0
        self._endpoint = endpoint
        self._monitor = monitor.peer
        self._trainers = trainers
        self._clock = clock
        self._swarm_numbers = swarm_numbers
        self._on_stuck = on_stuck
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
        """What a lost trainer has reported stands."""

    def begin_round(self, round: int, *, trains: bool) -> None:
        """Forget who was done in the round before.

        Args:
            round: the one that begins.
            trains: False for the last evaluation, which is no round of its own.
        """
        self._round = round
        if trains:
            self.progress.round = round
        self.progress.begin_evaluation(round - 1)
        self._done = set()

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
        """Send numbers about the run to the monitor."""
        self._endpoint.post(self._monitor, Metrics("client", self._endpoint.peer_id, self.progress.round, dict(values)))

    def _step(self, report: StepReport) -> None:
        progress = self.progress
        progress.step(report, self._clock.now_s())
        self._last_number[report.slot] = max(report.key.number, self.last_number(report.slot))
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

    def _evaluated(self, report: EvalReport) -> None:
        loss = self.progress.evaluated(report, self.num_holdout)
        if loss is not None:
            logger.info("evaluation.done", extra={"held": report.held, "loss": loss})
            self.post({"loss/eval": loss, "samples": float(self.progress.samples)})

    def _trainer_done(self, report: TrainerDone) -> None:
        self.progress.done(report)
        if report.round == self._round:
            self._done.add(report.slot)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
