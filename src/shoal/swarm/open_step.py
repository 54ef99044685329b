"""One open attempt at one replica: what has arrived, what is done, and what its device operation could be next.

    opened -> begun (first forward) -> prepared (last backward) -> decided -> applied
                    \\__________________________/ \\_ settling: its trainer is lost, the path's replicas are asked

Forwards and backwards run in microbatch order, so sums and buffers depend on no arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.step_operations import Decision, Operation, OperationKind, Ready
from shoal.wire.messages.step import Backward, Forward, Labels, Open, Outcome, StepEntry

Payload = Forward | Labels | Backward
"""Messages that bring a tensor."""


@dataclass(slots=True)
class OpenStep:
    """State of one attempt.

    Attributes:
        request: The Open that began it.
        trainer: Who sent it, and alone may feed, commit and abort it.
        stage: Place of this replica on the path.
        opened: Counts the steps opened at this replica.
        inputs: Bitmap of the microbatches whose input has arrived; `labels` and `gradients` likewise.
        forwards: Forwards done: microbatches 0 to this, exclusive.
        backwards: Backwards done, likewise.
        version: Commits that this replica had applied in the round when the first forward started; -1 before.
        prepared: All backwards are done.
        decision: Known once the step is to be committed; final.
        commit_asked: The trainer waits for an answer to its Commit.
        answers: The other replicas' answers while settling; None while the trainer still decides.
    """

    request: Open
    trainer: PeerId
    stage: int
    opened: int
    inputs: int = 0
    labels: int = 0
    gradients: int = 0
    forwards: int = 0
    backwards: int = 0
    version: int = -1
    prepared: bool = False
    decision: Decision | None = None
    commit_asked: bool = False
    answers: dict[PeerId, Outcome] | None = None

    @property
    def begun(self) -> bool:
        """The first forward has started."""
        return self.version >= 0

    @property
    def settling(self) -> bool:
        """Nobody but the replicas of its path, or the round, can decide it any more."""
        return self.answers is not None

    @property
    def in_doubt(self) -> bool:
        """Settling, and not decided yet."""
        return self.answers is not None and self.decision is None

    @property
    def num_microbatches(self) -> int:
        return len(self.request.microbatch_samples)

    @property
    def num_samples(self) -> int:
        return sum(self.request.microbatch_samples)

    @property
    def path(self) -> tuple[PeerId, ...]:
        return tuple(hop.peer for hop in self.request.path)

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

    def unanswered(self) -> list[PeerId]:
        """Whom to ask for the outcome: the other replicas of the path that have not told it."""
        answers = self.answers or {}
        me = self.path[self.stage]
        return [peer for peer in self.path if peer != me and peer not in answers]

    def entry(self, decision: Decision) -> StepEntry:
        """How the log tells of it once it is applied."""
        return StepEntry(
            key=self.request.key,
            path=self.path,
            version=self.version,
            samples=self.request.samples,
            num_samples=self.num_samples,
            scale=decision.scale,
            lr=decision.lr,
            skipped=decision.skipped,
        )

    def ready(self) -> Ready | None:
        """The forward or backward that could run now, backward first."""
        kind = self._next_kind()
        if kind is None:
            return None
        microbatch = self.forwards if kind == OperationKind.FORWARD else self.backwards
        return Ready(Operation(kind, self.request.key, microbatch), self.begun, self.opened)

    def _next_kind(self) -> OperationKind | None:
        if self.prepared:
            return None
        if self.downstream is None:
            both = self.inputs & self.labels
            return OperationKind.LOSS if both >> self.backwards & 1 else None
        if self.backwards < self.forwards and self.gradients >> self.backwards & 1:
            return OperationKind.BACKWARD
        return OperationKind.FORWARD if self.inputs >> self.forwards & 1 else None
