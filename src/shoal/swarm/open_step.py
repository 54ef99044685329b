"""One open attempt at one replica: what has arrived, what is done, and what its device operation could be next.

    opened -> begun (first forward) -> prepared (all gradients) -> decided -> applied
                    \\_________________________/ \\_ settling: its trainer is lost, the path's replicas are asked

Forwards, backwards and weight gradients run in microbatch order, so sums and buffers depend on no arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.ids import PeerId
from shoal.swarm.settlement import Settlement
from shoal.swarm.step_operations import Decision, Operation, OperationKind, ReadyOperation, Schedule, SendStepMessage
from shoal.wire.messages.step import (
    AskOutcome,
    Backward,
    Forward,
    Labels,
    MicrobatchDone,
    Open,
    StepEntry,
)

Payload = Forward | Labels | Backward
"""Messages that bring a tensor."""


@dataclass(slots=True)
class OpenStep:
    """State of one attempt.

    Attributes:
        trainer: sent it, and is the only peer that may feed, commit and abort it.
        stage: place of this replica on the path.
        opened: place of this step in the order in which steps were opened here.
        inputs: bitmap of the microbatches whose input has arrived; `labels` and `gradients` likewise.
        forwards: number of forwards done, counting those inside a LOSS: microbatches 0 to this, exclusive.
        backwards: number of backwards done, in the same order.
        weights: number of weight gradients done; only zero_bubble separates them from the backward.
        version: commits that this replica had applied in the round when the first forward started; -1 before.
        prepared: all gradients have been computed.
        decision: final; None until the step is to be committed.
        commit_asked: the trainer waits for an answer to its Commit.
        settlement: the answers of the other replicas; None while the trainer still decides.
    """

    request: Open
    trainer: PeerId
    stage: int
    opened: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    inputs: int = 0
    labels: int = 0
    gradients: int = 0
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    version: int = -1
    prepared: bool = False
    decision: Decision | None = None
    commit_asked: bool = False
    settlement: Settlement | None = None
    path: tuple[PeerId, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.path = tuple(hop.peer for hop in self.request.path)

    @property
    def begun(self) -> bool:
        """The first forward has started."""
        return self.version >= 0

    @property
    def settling(self) -> bool:
        """Nobody but the replicas of its path, or the round, can decide it any more."""
        return self.settlement is not None

    @property
    def in_doubt(self) -> bool:
        """Settling, and not decided yet."""
        return self.settlement is not None and self.decision is None

    @property
    def num_microbatches(self) -> int:
        return len(self.request.microbatch_samples)

    @property
    def num_samples(self) -> int:
        return sum(self.request.microbatch_samples)

    @property
    def num_targets(self) -> int:
        return sum(self.request.microbatch_targets)

    @property
    def upstream(self) -> PeerId:
        """From where inputs come: the previous replica, or the trainer."""
        return self.path[self.stage - 1] if self.stage > 0 else self.trainer

    @property
    def downstream(self) -> PeerId | None:
        """Where outputs go: the next replica, None for the last stage."""
        return self.path[self.stage + 1] if self.stage + 1 < len(self.path) else None

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

    def settle(self) -> Settlement:
        """From now on the replicas of its path decide it."""
        if self.settlement is None:
            self.settlement = Settlement([peer for peer in self.path if peer != self.path[self.stage]])
        return self.settlement

    def questions(self) -> list[SendStepMessage]:
        """Asks for the outcome whoever has not told it; nobody if the trainer still decides."""
        if self.settlement is None:
            return []
        ask = AskOutcome(self.request.key, self.settlement.forgotten)
        return [SendStepMessage(peer, ask) for peer in self.settlement.unanswered()]

    def results(self, operation: Operation) -> list[SendStepMessage]:
        """Who gets what an operation has computed."""
        key, microbatch = operation.key, operation.microbatch
        match operation.kind:
            case OperationKind.FORWARD if self.downstream is not None:
                return [SendStepMessage(self.downstream, Forward(key, microbatch))]
            case OperationKind.BACKWARD | OperationKind.LOSS:
                answer = MicrobatchDone(key, microbatch) if self.stage == 0 else Backward(key, microbatch)
                return [SendStepMessage(self.upstream, answer)]
            case _:
                return []

    def entry(self, decision: Decision) -> StepEntry:
        """How the log tells of it once it is applied."""
        return StepEntry(
            key=self.request.key,
            path=self.path,
            version=self.version,
            samples=self.request.samples,
            num_samples=self.num_samples,
            num_targets=self.num_targets,
            scale=decision.scale,
            lr=decision.lr,
            skipped=decision.skipped,
        )

    def ready(self) -> list[ReadyOperation]:
        """What could run now: a backward or else a forward, and weight gradients that were put off."""
        found = [] if self.prepared else [*self._next_microbatch(), *self._next_weights()]
        return [ReadyOperation(operation, self.begun, self.opened, self.forwards - self.weights) for operation in found]

    def _next_microbatch(self) -> list[Operation]:
        done_first = self.num_microbatches if self.schedule == Schedule.GPIPE else 0
        if self.downstream is None and self.forwards >= done_first:
            arrived = self.labels if done_first else self.inputs & self.labels
            return self._operation(OperationKind.LOSS, self.backwards) if arrived >> self.backwards & 1 else []
        if self.backwards < self.forwards and self.gradients >> self.backwards & 1:
            return self._operation(OperationKind.BACKWARD, self.backwards)
        return self._operation(OperationKind.FORWARD, self.forwards) if self.inputs >> self.forwards & 1 else []

    def _next_weights(self) -> list[Operation]:
        return self._operation(OperationKind.WEIGHTS, self.weights) if self.weights < self.backwards else []

    def _operation(self, kind: OperationKind, microbatch: int) -> list[Operation]:
        return [Operation(kind, self.request.key, microbatch)]

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
        """Whether all gradients are there once the operation is done."""
        last = operation.microbatch == self.num_microbatches - 1
        if self.schedule == Schedule.ZERO_BUBBLE:
            return last and operation.kind == OperationKind.WEIGHTS
        return last and operation.kind in (OperationKind.BACKWARD, OperationKind.LOSS)
