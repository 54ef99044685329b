"""The trainer's end of the training step: connects the machine and the network. No torch.

train -> StepTrainer -> Open, inputs, labels, Commit -> replicas -> receive -> StepTrainer -> ... -> Finished
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import anyio

from shoal.clock import Clock
from shoal.data.microbatch import Microbatch
from shoal.errors import LocalProtocolError, NoPipeline, RoundAborted, RoundClosed
from shoal.events.base import emit
from shoal.events.steps import StepReplayed, StepSetback
from shoal.ids import PeerId, StepKey
from shoal.log import FloodGate
from shoal.runtime.waking import Signal
from shoal.swarm.microbatch_cut import MicrobatchPart, cut, smallest_cap
from shoal.swarm.step_trainer import (
    Dial,
    FeedMicrobatch,
    Finished,
    NoPath,
    Note,
    RoundOver,
    StepEnd,
    StepPlan,
    StepTrainer,
    TrainerEffect,
)
from shoal.transport.base import Endpoint, Received
from shoal.transport.drive import drive
from shoal.wire.messages import Hop, SampleRange, Traffic
from shoal.wire.messages.base import ReplicaRef, Replicas
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.step import (
    Aborted,
    Broken,
    Busy,
    Committed,
    EvalForward,
    EvalLabels,
    EvalRefused,
    EvalResult,
    Forward,
    Labels,
    MicrobatchDone,
    Open,
    Opened,
    Prepared,
    Refused,
)

logger = logging.getLogger(__name__)

_MAX_TOLD_CHARS = 500
"""Of what anybody may send."""


class StepDriver:
    """Drives the steps and evaluations of one trainer, one at a time."""

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        trainer: int,
        generation: int,
        window: int | None,
        max_grad_norm: float | None,
        clock: Clock,
        step_timeout_s: float,
        evaluation_window: int = 2,
        is_wrapped: bool = False,
    ) -> None:
        """Drives nothing yet.

        Args:
            window: Microbatches in flight at most; None sends all at once.
            max_grad_norm: Gradients are scaled down to this norm; None does not clip.
            step_timeout_s: Without progress, until a step is replayed.
            evaluation_window: Batches of an evaluation in flight at most.
            is_wrapped: Whether the first stage has the head of the model as well, see `model.partition`.
        """
        self._endpoint = endpoint
        self._clock = clock
        self._machine = StepTrainer(
            trainer=trainer,
            generation=generation,
            window=window,
            max_grad_norm=max_grad_norm,
            step_timeout_s=step_timeout_s,
            is_wrapped=is_wrapped,
        )
        self._evaluation = EvalDriver(
            endpoint, window=evaluation_window, timeout_s=step_timeout_s, is_wrapped=is_wrapped
        )
        self._gate = FloodGate(logger, clock)
        self._changed = Signal()
        self._wake_at_s = math.inf
        self._microbatches: Sequence[Microbatch] = ()
        self._note: Callable[[StepKey, tuple[PeerId, ...]], None] | None = None

    def receive(self, event: Received) -> bool:
        """Takes a step message for a trainer; see `transport.dispatch.Handler`."""
        message = event.message
        match message:
            case EvalResult() | EvalRefused():
                self._evaluation.receive(event.peer, message)
            case Opened() | Busy() | Refused() | MicrobatchDone() | Prepared() | Committed() | Aborted() | Broken():
                if isinstance(message, Refused | Broken | Aborted) and self._machine.is_current(message.key):
                    self._gate.emit(StepSetback(event.peer, repr(message)[:_MAX_TOLD_CHARS]), event.peer)
                self._do(self._machine.receive(event.peer, message, self._clock.now_s()))
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        self._evaluation.peer_lost(peer)
        self._do(self._machine.lost(peer, self._clock.now_s()))

    def peer_found(self, peer: PeerId) -> None:
        """There is a new connection with a peer."""
        self._machine.peer_found(peer)

    def round_begun(self, round: int) -> None:
        """The client has begun a round, so those before are over."""
        self._do(self._machine.round_begun(round))

    async def train(
        self,
        *,
        round: int,
        number: int,
        microbatches: Sequence[Microbatch],
        samples: tuple[SampleRange, ...],
        lr: float,
        path: tuple[Hop, ...],
        replicas: Replicas,
        note: Callable[[StepKey, tuple[PeerId, ...]], None],
        base: str = "",
        loss_scale: float = 1.0,
        warrant: bytes = b"",
    ) -> Finished:
        """Trains one step, over other replicas where those of `path` fail, until it is applied or skipped.

        The same `number` may be given again after NoPipeline; its attempts count on. If the waiting task is cancelled
        before the first Commit, the attempt is aborted.

        Args:
            number: Of the step, counted from 0 over the whole run.
            microbatches: The step's samples, in the order in which their gradients are added. An attempt over a path
                with caps cuts them further.
            samples: The positions of the samples in the data.
            path: The home replicas, one for each stage.
            replicas: All replicas of each stage, best first.
            note: Called with each attempt and its path before anything is sent for it.
            base: Hash of the record on top of which the round is trained.
            loss_scale: Times this the loss is differentiated; a power of two.
            warrant: Of the client, see `Open`.

        Raises:
            NoPipeline: Some stages, which the message names, have no replica that can be used.
            RoundClosed: The round is over; the step is applied nowhere.
            LocalProtocolError: A step is being trained already, or there is nothing to train.
        """
        if self._note is not None or not microbatches:
            raise LocalProtocolError(f"step {number} cannot start: one at a time, with at least one microbatch")
        targets = tuple(microbatch.targets for microbatch in microbatches)
        for hop in (*path, *(replica.hop for stage in replicas for replica in stage)):  # these are known since later
            self._endpoint.introduce(hop)
        self._microbatches, self._note = microbatches, note
        try:
            plan = StepPlan(round, number, targets, samples, lr, path, replicas, base, loss_scale, warrant)
            self._do(self._machine.start(plan, self._clock.now_s()))
            end = await self._ended()
        finally:
            self._do(self._machine.cancel())
            self._microbatches, self._note = (), None
        match end:
            case RoundOver(peer):
                raise RoundClosed(f"round {round} is closed at {peer}")
            case NoPath((stage,), refusal, num_refusing, num_replicas, is_model) if refusal:
                are_all = num_refusing == num_replicas
                who = "every replica" if are_all else f"{num_refusing} of {num_replicas} replicas"
                refuse = "refuses" if are_all else "refuse"
                raise NoPipeline(f"{who} of stage {stage} {refuse} the step: {refusal}", refusal, is_model=is_model)
            case NoPath(stages):
                names = ", ".join(map(str, stages))
                raise NoPipeline(f"no replica can be used of stage {names}: start servers there, or wait for them")
            case Finished():
                return end

    async def evaluate(
        self,
        *,
        evaluation: int,
        base_round: int,
        microbatches: Sequence[Microbatch],
        path: tuple[ReplicaRef, ...],
        refuses: Callable[[PeerId], None] = lambda _: None,
    ) -> tuple[float, int]:
        """Evaluates record `base_round` over `path`.

        Args:
            evaluation: A number that this trainer has not used before.
            base_round: The round whose record the replicas must hold.
            path: One replica for each stage.
            refuses: Told of a replica that does not hold the record, or does not reach the next one.

        Returns:
            The sum of the losses over the targets, and their number.

        Raises:
            RoundAborted: A replica refuses, is lost, or does not answer in time.
        """
        cap = smallest_cap(replica.cap for replica in path)
        parts = [_part(microbatches, part) for part in cut([each.num_samples for each in microbatches], cap)]
        return await self._evaluation.evaluate(
            evaluation, base_round, parts, tuple(replica.hop for replica in path), refuses
        )

    async def _ended(self) -> StepEnd:
        machine = self._machine
        while (end := machine.ended) is None:
            await drive(machine, self._clock, self._changed, self._do, until=lambda: machine.ended is not None)
        return end

    def _do(self, effects: Sequence[TrainerEffect]) -> None:
        for effect in effects:
            match effect:
                case Note(key, path):
                    if self._note is not None:
                        self._note(key, tuple(hop.peer for hop in path))
                case FeedMicrobatch(key, number, part, inputs_to, labels_to):
                    microbatch = _part(self._microbatches, part)
                    traffic = Traffic.ACTIVATIONS
                    self._endpoint.post(inputs_to, Forward(key, number), microbatch.for_first_stage, traffic)
                    self._endpoint.post(labels_to, Labels(key, number), microbatch.for_loss, traffic)
                case Dial(to):
                    self._endpoint.post(to, Heartbeat())
                case _:
                    if isinstance(effect.message, Open) and effect.message.key.attempt > 0:
                        emit(logger, StepReplayed(str(effect.message.key), effect.to))
                    self._endpoint.post(effect.to, effect.message)
        # Most messages are progress, which puts the time off: nobody is woken for that.
        before_s, self._wake_at_s = self._wake_at_s, self._machine.wake_at_s
        if self._machine.ended is not None or self._wake_at_s < before_s:
            self._changed.notify()


def _part(microbatches: Sequence[Microbatch], part: MicrobatchPart) -> Microbatch:
    """A part of uncut microbatches, as views."""
    return microbatches[part.whole].rows(part.start, part.stop)


class EvalDriver:
    """One evaluation at a time: a few batches in flight over one path, losses summed in order."""

    def __init__(self, endpoint: Endpoint, *, window: int, timeout_s: float, is_wrapped: bool = False) -> None:
        self._endpoint = endpoint
        self._window = window
        self._timeout_s = timeout_s
        # Where on a path the loss is computed.
        self._head = 0 if is_wrapped else -1
        self._evaluation = -1
        self._path: tuple[PeerId, ...] = ()
        self._results: dict[int, EvalResult] = {}
        self._num_sent = 0
        self._problem: str | None = None
        self._refuses: Callable[[PeerId], None] = lambda _: None
        self._changed = Signal()

    def receive(self, peer: PeerId, message: EvalResult | EvalRefused) -> None:
        """Takes an answer; those of another evaluation mean nothing."""
        if message.evaluation != self._evaluation or peer not in self._path:
            return
        if isinstance(message, EvalRefused):
            if message.microbatch in self._results:
                return  # it was passed on, arrived, and was answered before the connection ended
            self._refuses(peer)
            self._problem = f"{peer} refused: {message.reason}"
        elif peer == self._path[self._head] and message.microbatch < self._num_sent:
            self._results.setdefault(message.microbatch, message)
        self._changed.notify()

    def peer_lost(self, peer: PeerId) -> None:
        """An evaluation over a lost replica fails."""
        if peer in self._path:
            self._problem = f"{peer} is lost"
            self._changed.notify()

    async def evaluate(
        self,
        evaluation: int,
        base_round: int,
        microbatches: Sequence[Microbatch],
        path: tuple[Hop, ...],
        refuses: Callable[[PeerId], None],
    ) -> tuple[float, int]:
        for hop in path:
            self._endpoint.introduce(hop)
        self._path = tuple(hop.peer for hop in path)
        self._evaluation, self._results, self._problem = evaluation, {}, None
        self._refuses = refuses
        self._num_sent = 0
        try:
            while len(self._results) < len(microbatches):
                while self._num_sent < len(microbatches) and self._num_sent - len(self._results) < self._window:
                    self._send(evaluation, self._num_sent, base_round, microbatches[self._num_sent], path)
                    self._num_sent += 1
                await self._change()
                if self._problem is not None:
                    raise RoundAborted(f"evaluation of round {base_round}: {self._problem}")
        finally:
            self._evaluation, self._path = -1, ()
        loss_sum, num_targets = 0.0, 0
        for number, microbatch in enumerate(microbatches):
            count = sum(microbatch.targets)
            loss_sum += self._results[number].loss * count
            num_targets += count
        return loss_sum, num_targets

    def _send(
        self, evaluation: int, number: int, base_round: int, microbatch: Microbatch, path: tuple[Hop, ...]
    ) -> None:
        forward = EvalForward(evaluation, number, base_round, path, self._endpoint.hop)
        self._endpoint.post(path[0].peer, forward, microbatch.for_first_stage, Traffic.ACTIVATIONS)
        labels = EvalLabels(evaluation, number, base_round)
        self._endpoint.post(path[self._head].peer, labels, microbatch.for_loss, Traffic.ACTIVATIONS)

    async def _change(self) -> None:
        """Waits for an answer, a loss, or too long."""
        with anyio.move_on_after(self._timeout_s) as timer:
            await self._changed.take()
        if timer.cancelled_caught:
            self._problem = f"no answer within {self._timeout_s:g} s"
