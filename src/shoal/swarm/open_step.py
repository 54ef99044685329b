"""One open attempt at one replica: how far it is, who decides it, and what its device operation could be next.

opened -> begun (first forward) -> prepared (all gradients) -> decided -> applied
                \\_________________________/ \\_ settling: its trainer is lost, the path's replicas are asked
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.ids import PeerId
from shoal.swarm.microbatch_pass import MicrobatchPass, Payload
from shoal.swarm.settlement import Settlement
from shoal.swarm.step_operations import Decision, Operation, ReadyOperation, Schedule, SendStepMessage
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import AskOutcome, Open, StepEntry


@dataclass(slots=True)
class OpenStep:
    """State of one attempt.

    Attributes:
        trainer: sent it, and is the only peer that may feed, commit and abort it.
        stage: place of this replica on the path.
        opened: place of this step in the order in which steps were opened here.
        is_wrapped: whether the first replica of the path has the head as well, see `MicrobatchPass`.
        version: commits that this replica had applied in the round when the first forward started; -1 before.
        prepared: all gradients have been computed.
        decision: final; None until the step is to be committed.
        commit_asked: the trainer waits for an answer to its Commit.
        settlement: the answers of the other replicas; None while the trainer still decides.
        passes: the ways of its microbatches through this replica; that through the head comes last.
    """

    request: Open
    trainer: PeerId
    stage: int
    opened: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    is_wrapped: bool = False
    version: int = -1
    prepared: bool = False
    decision: Decision | None = None
    commit_asked: bool = False
    settlement: Settlement | None = None
    path: tuple[PeerId, ...] = field(init=False)
    passes: tuple[MicrobatchPass, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.path = tuple(hop.peer for hop in self.request.path)
        following = (*self.path[1:], self.path[0] if self.is_wrapped else None)
        upstream = self.path[self.stage - 1] if self.stage else self.trainer
        self.passes = (self._pass(upstream, following[self.stage]),)
        if self.is_wrapped and self.stage == 0:
            self.passes += (self._pass(self.path[-1], None, is_head=True),)

    def _pass(self, upstream: PeerId, downstream: PeerId | None, *, is_head: bool = False) -> MicrobatchPass:
        key, num_microbatches = self.request.key, len(self.request.microbatch_samples)
        return MicrobatchPass(key, num_microbatches, self.trainer, upstream, downstream, self.schedule, is_head)

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
    def num_samples(self) -> int:
        return sum(self.request.microbatch_samples)

    @property
    def entry_bytes(self) -> int:
        """Of its entry in the log, see below."""
        return entry_bytes(self.path, self.request.samples)

    @property
    def num_targets(self) -> int:
        return sum(self.request.microbatch_targets)

    @property
    def neighbours(self) -> frozenset[PeerId | None]:
        """With whom it exchanges tensors."""
        return frozenset(peer for each in self.passes for peer in (each.upstream, each.downstream))

    def pass_of(self, sender: PeerId, message: Payload) -> MicrobatchPass | None:
        """For which pass a tensor is; None: it is not the sender's to send."""
        return next((each for each in self.passes if each.source_of(message) == sender), None)

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
        """What could run now, of every pass."""
        if self.prepared:
            return []
        return [
            ReadyOperation(operation, self.begun, self.opened, each.forwards - each.weights)
            for each in self.passes
            for operation in each.ready()
        ]

    def done(self, operation: Operation) -> list[SendStepMessage]:
        """A forward, a backward or weight gradients have been computed; returns who gets what."""
        done = self._pass_through(operation)
        done.done(operation)
        return done.results(operation)

    def completes(self, operation: Operation) -> bool:
        """Whether all gradients are there once the operation is done."""
        own = self._pass_through(operation)
        return own.completes(operation) and all(each.is_complete for each in self.passes if each is not own)

    def _pass_through(self, operation: Operation) -> MicrobatchPass:
        return self.passes[-1] if operation.is_head else self.passes[0]


def entry_bytes(path: Iterable[PeerId], samples: Sequence[SampleRange]) -> int:
    """Return about how long the entry of a step is in a message, and not less."""
    return 128 + sum(len(peer) + 4 for peer in path) + 28 * len(samples)
