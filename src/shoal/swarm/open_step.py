"""One open attempt at one replica: how far it is, who decides it, and what its device operation could be next.

opened -> begun (first forward) -> prepared (all gradients) -> decided -> applied
                \\_________________________/ \\_ settling: its trainer is lost, the path's replicas are asked
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.ids import PeerId, StepKey
from shoal.swarm.microbatch_pass import MicrobatchPass, Payload
from shoal.swarm.settlement import Settlement
from shoal.swarm.step_operations import Decision, Operation, ReadyOperation, Schedule, SendStepMessage
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import AskOutcome, Open, StepEntry

_NEVER = StepKey(1 << 62, 0, 0, 0)
"""Higher than every attempt."""


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


class AttemptLedger:
    """A replica's memory of attempts; its size has a bound that peers cannot raise.

    A trainer's attempts are ordered by their keys, and it opens the next one only when the last is over. So one key per
    trainer, the newest that was opened here, is the tombstone of all older ones: an attempt that is not newer, not open
    and not committed is aborted. Of attempts that were never opened here anybody can speak, so what is said of them
    binds no more than it has to: an abort the attempts of who has sent it, an answer the one that was asked for.

    Attributes:
        is_steady: the replica has entered the round once only, and has dropped nothing of it.
    """

    def __init__(self) -> None:
        self._round = 0
        self.is_steady = True
        self._lowest_generation: dict[int, int] = {}
        self._newest: dict[int, StepKey] = {}
        self._oldest_opened: dict[int, StepKey] = {}
        self._committed: dict[StepKey, Decision] = {}
        # An answer to a Commit may be lost with its connection, and be asked for again in the next round.
        self._committed_before: dict[StepKey, Decision] = {}
        # Of each trainer the lowest attempt that somebody was told of that it is not committed here.
        self._denied: dict[int, StepKey] = {}
        # Of attempts that were not opened here, of peers that are connected: the last one that a peer has ended itself,
        # and of each trainer the last one that a peer was told of that it is not committed.
        self._ended: dict[PeerId, StepKey] = {}
        self._answered: defaultdict[int, dict[PeerId, StepKey]] = defaultdict(dict)

    def is_fenced(self, key: StepKey) -> bool:
        """Whether the attempt's generation has been replaced."""
        return key.generation < self.lowest_generation(key.trainer)

    def is_new(self, key: StepKey) -> bool:
        """Whether the attempt is newer than all of its trainer that were opened here."""
        newest = self._newest.get(key.trainer)
        return newest is None or key > newest

    def may_open(self, sender: PeerId, key: StepKey) -> bool:
        """Whether `sender` may open the attempt: it is new, and was not said to be over before it came."""
        ended = self._ended.get(sender)
        is_ended = ended is not None and ended.trainer == key.trainer and key <= ended
        return self.is_new(key) and not is_ended and key not in self._answered[key.trainer].values()

    def end(self, sender: PeerId, key: StepKey) -> None:
        """`sender` opens neither this attempt, which was not opened here, nor an older one any more."""
        self._ended[sender] = max(key, self._ended.get(sender, key))

    def forget(self, peer: PeerId) -> None:
        """The connection to a peer has ended. What it had sent before is not on its way any more."""
        self._ended.pop(peer, None)
        for answered in self._answered.values():
            answered.pop(peer, None)

    def opened(self, key: StepKey) -> None:
        """The attempt, which is new, is opened here."""
        self._newest[key.trainer] = key
        oldest = self._oldest_opened.get(key.trainer)
        if oldest is None or key.generation > oldest.generation:
            self._oldest_opened[key.trainer] = key

    def remembers(self, key: StepKey) -> bool:
        """Whether an earlier generation of this replica cannot have had the attempt: this one has had it, or an older
        one.

        Older ones of the same generation of the trainer only: one that has been replaced may still open steps here,
        where nobody knows that, after an earlier generation of this replica has had steps of its successor.
        """
        oldest = self._oldest_opened.get(key.trainer)
        return oldest is not None and key.generation == oldest.generation and key >= oldest

    def answer(self, peer: PeerId, key: StepKey) -> None:
        """A peer has asked for this attempt, of which nothing is known here: it is denied, and not opened any more."""
        self._answered[key.trainer][peer] = key
        self.deny(key)

    def deny(self, key: StepKey) -> None:
        """Somebody is told that this attempt, of which nothing is known here, is not committed; and so it stays."""
        self._denied[key.trainer] = min(key, self._denied.get(key.trainer, key))

    def lowest_generation(self, trainer: int) -> int:
        """Lowest generation of the trainer that is not fenced; 0 if none is."""
        return self._lowest_generation.get(trainer, 0)

    def fence(self, generations: dict[int, int]) -> None:
        """Refuse every generation of a trainer below the given one."""
        for trainer, lowest in generations.items():
            self._lowest_generation[trainer] = max(lowest, self.lowest_generation(trainer))

    def since(self, generations: dict[int, int]) -> dict[int, StepKey]:
        """Of each trainer that has opened attempts here below the given generation, the oldest: see `remembers`."""
        opened = {trainer: self._oldest_opened.get(trainer) for trainer in generations}
        return {
            trainer: oldest
            for trainer, oldest in opened.items()
            if oldest is not None and oldest.generation < generations[trainer]
        }

    def committed(self, key: StepKey) -> Decision | None:
        """With what the attempt was committed here, in this round or the one before; None if it was not."""
        return self._committed.get(key) or self._committed_before.get(key)

    def commit(self, key: StepKey, decision: Decision) -> None:
        """The attempt is applied."""
        self._committed[key] = decision

    def resume(self, log: Iterable[StepEntry]) -> bool:
        """Take over what an earlier generation of this replica has committed in this round.

        Returns:
            False, and nothing is changed, if some peer may have been told meanwhile that part of it is not committed.
        """
        decisions = {entry.key: Decision(entry.scale, entry.lr, entry.skipped) for entry in log}
        if any(self.is_fenced(key) or key >= self._denied.get(key.trainer, _NEVER) for key in decisions):
            return False
        for key, decision in decisions.items():
            self._newest[key.trainer] = max(key, self._newest.get(key.trainer, key))
            self.commit(key, decision)
        return True

    def start_round(self, round: int) -> None:
        """Forget the commits of the round before the one that has ended.

        If the new round is not the next one, commits were dropped that nobody has recorded: then this replica is like
        one that was started again, and forgets what was opened too.
        """
        self._committed_before, self._committed = self._committed, {}
        if round != self._round + 1:
            self._oldest_opened.clear()
            self.is_steady = False
        elif self._round > 0:
            self.is_steady = True
        self._round = round

    def committed_below(self, generations: dict[int, int]) -> tuple[StepKey, ...]:
        """This round's commits of generations below the given ones."""
        return keys_below(self._committed, generations)


def keys_below(keys: Iterable[StepKey], generations: dict[int, int]) -> tuple[StepKey, ...]:
    """Those of `keys` whose generation is below their trainer's in `generations`."""
    return tuple(key for key in keys if key.generation < generations.get(key.trainer, 0))
