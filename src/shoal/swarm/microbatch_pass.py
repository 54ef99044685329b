"""The way of a step's microbatches through one part of a stage: what has arrived, what is done, what could be next.

    upstream --Forward--> [ forward ... backward ] --Forward--> downstream
             <-Backward-                           <-Backward--

A replica has one pass of a step. Of a wrapped step the first stage has two: through its own units, which the trainer
feeds, and through the head of the model, which the last replica of the path feeds and which computes the loss.

Forwards, backwards and weight gradients run in microbatch order, so sums and buffers depend on no arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.ids import PeerId, StepKey
from shoal.swarm.step_operations import Operation, OperationKind, Schedule, SendStepMessage
from shoal.wire.messages.step import Backward, Forward, Labels, MicrobatchDone

Payload = Forward | Labels | Backward
"""Messages that bring a tensor."""


@dataclass(slots=True)
class MicrobatchPass:
    """Of one attempt.

    Attributes:
        trainer: gives the labels, and the inputs of the first stage.
        upstream: where inputs come from: the previous replica, or the trainer.
        downstream: where outputs go: the next replica; None: the loss is computed here.
        is_head: whether this is the way through the head that a wrapped first stage hosts.
        inputs: bitmap of the microbatches whose input has arrived; `labels` and `gradients` likewise.
        forwards: number of forwards done, counting those inside a LOSS: microbatches 0 to this, exclusive.
        backwards: number of backwards done, in the same order.
        weights: number of weight gradients done; only zero_bubble separates them from the backward.
    """

    key: StepKey
    num_microbatches: int
    trainer: PeerId
    upstream: PeerId
    downstream: PeerId | None
    schedule: Schedule
    is_head: bool = False
    inputs: int = 0
    labels: int = 0
    gradients: int = 0
    forwards: int = 0
    backwards: int = 0
    weights: int = 0

    def source_of(self, message: Payload) -> PeerId | None:
        """Who alone may send this; None if nobody may."""
        if not 0 <= message.microbatch < self.num_microbatches:
            return None
        match message:
            case Forward():
                return self.upstream
            case Labels():
                return self.trainer if self.downstream is None else None
            case Backward():
                return self.downstream

    def has(self, message: Payload) -> bool:
        """Whether it has arrived before."""
        match message:
            case Forward():
                bitmap = self.inputs
            case Labels():
                bitmap = self.labels
            case Backward():
                bitmap = self.gradients
        return bool(bitmap >> message.microbatch & 1)

    @property
    def num_held(self) -> int:
        """Microbatches whose input has arrived, and which have not gone back."""
        return self.inputs.bit_count() - self.backwards

    def note(self, message: Payload) -> None:
        """It has arrived; the driver keeps the tensor."""
        bit = 1 << message.microbatch
        match message:
            case Forward():
                self.inputs |= bit
            case Labels():
                self.labels |= bit
            case Backward():
                self.gradients |= bit

    def answers(self, message: Payload) -> list[SendStepMessage]:
        """What is sent again because this has come again: the backward is done, and is never added twice."""
        if message.microbatch >= self.backwards or isinstance(message, Labels):
            return []
        return self.results(self._operation(OperationKind.BACKWARD, message.microbatch))

    def results(self, operation: Operation) -> list[SendStepMessage]:
        """Who gets what an operation has computed."""
        key, microbatch = operation.key, operation.microbatch
        match operation.kind:
            case OperationKind.FORWARD if self.downstream is not None:
                return [SendStepMessage(self.downstream, Forward(key, microbatch))]
            case OperationKind.BACKWARD | OperationKind.LOSS:
                is_fed = self.upstream == self.trainer
                answer = MicrobatchDone(key, microbatch) if is_fed else Backward(key, microbatch)
                return [SendStepMessage(self.upstream, answer)]
            case _:
                return []

    def ready(self) -> list[Operation]:
        """What could run now: a backward or else a forward, and weight gradients that were put off."""
        following = self._next_microbatch()
        put_off = [self._operation(OperationKind.WEIGHTS, self.weights)] if self.weights < self.backwards else []
        return put_off if following is None else [following, *put_off]

    def _next_microbatch(self) -> Operation | None:
        done_first = self.num_microbatches if self.schedule == Schedule.GPIPE else 0
        if self.downstream is None and self.forwards >= done_first:
            arrived = self.labels if done_first else self.inputs & self.labels
            return self._operation(OperationKind.LOSS, self.backwards) if arrived >> self.backwards & 1 else None
        if self.backwards < self.forwards and self.gradients >> self.backwards & 1:
            return self._operation(OperationKind.BACKWARD, self.backwards)
        return self._operation(OperationKind.FORWARD, self.forwards) if self.inputs >> self.forwards & 1 else None

    def _operation(self, kind: OperationKind, microbatch: int) -> Operation:
        return Operation(kind, self.key, microbatch, is_head=self.is_head)

    def done(self, operation: Operation) -> None:
        """A forward, a backward or weight gradients have been computed."""
        following = operation.microbatch + 1
        match operation.kind:
            case OperationKind.FORWARD:
                self.forwards = following
            case OperationKind.WEIGHTS:
                self.weights = following
            case _:
                self.forwards, self.backwards = max(self.forwards, following), following
                if self.schedule != Schedule.ZERO_BUBBLE:
                    self.weights = following

    def completes(self, operation: Operation) -> bool:
        """Whether all gradients of this pass are there once the operation is done."""
        last = operation.microbatch == self.num_microbatches - 1
        if self.schedule == Schedule.ZERO_BUBBLE:
            return last and operation.kind == OperationKind.WEIGHTS
        return last and operation.kind in (OperationKind.BACKWARD, OperationKind.LOSS)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of this pass are there."""
        return self.weights == self.num_microbatches
