"""The trainer's side of the training step (docs/protocol.md, "The training step") without I/O.

    start -> OPENING -> RUNNING -> COMMITTING -> ended
       ^        |          |           | every replica says "aborted"
       |________|__________|___________|    a new attempt, over other replicas where one failed
       WAITING until a replica that is avoided may be tried again

Before the first Commit any failure aborts the attempt everywhere. From the first Commit on the step stands, and one
"committed" makes it done: the others have the Commit in their queue, before anything of the next step, or they lose us
and ask those that have applied it.

That the round is closed is believed when a second replica says it, when there is no other path that nothing speaks
against, or when the client begins the next round: one replica that lies costs a round trip, and not the round.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from shoal.ids import PeerId, StepKey
from shoal.swarm.flight_window import FlightWindow
from shoal.swarm.microbatch_cut import KnownCaps, MicrobatchPart, cut
from shoal.swarm.step_operations import BEHIND, CLOSED, SendStepMessage, decision_of, gradient_norm
from shoal.swarm.step_path import Avoidance, candidates, choose_path, is_undoubted
from shoal.wire.messages.base import Hop, Replicas, RouterReport, SampleRange
from shoal.wire.messages.step import (
    Abort,
    Aborted,
    Broken,
    Busy,
    Commit,
    Committed,
    MicrobatchDone,
    Open,
    Opened,
    Prepared,
    Refused,
    StepMessage,
)

_FIRST_BUSY_S, _MAX_BUSY_S = 0.02, 1.0
_LOST_S = 0.5
# How long a peer that cannot be reached is dialled again when its stage has no other.
_LOST_PATIENCE_S = 3.0
_BROKEN_S = 1.0
# A replica that dials a neighbour behind a cut link learns it seconds later, and the step waits for it.
_SUSPECT_PAIR_S = 15.0
_REFUSED_S = 0.1
_SUSPECT_S = 60.0
# Of one step, other than by replicas that are behind, and beside the first time that a replica says that the model
# fails: then the cause is not a single replica.
_MAX_REFUSALS = 8
_MAX_REASON_CHARS = 500
_MAX_ROUTERS = 4096
"""Of all stages together, so that a step can be reported whatever each of them says."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to train. `home` is preferred; `replicas[s]` are all replicas of stage s, best first. `microbatch_targets`
    has for each microbatch how many targets each of its samples has; an attempt over a path with caps cuts further.
    `base`, `loss_scale` and `warrant`: see `Open`."""

    round: int
    number: int
    microbatch_targets: tuple[tuple[int, ...], ...]
    samples: tuple[SampleRange, ...]
    lr: float
    home: tuple[Hop, ...]
    replicas: Replicas
    base: str = ""
    loss_scale: float = 1.0
    warrant: bytes = b""


@dataclass(frozen=True, slots=True)
class Note:
    """Effect: write attempt and path into the lease, before anything is sent for it."""

    key: StepKey
    path: tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class FeedMicrobatch:
    """Effect: send the input of a microbatch to the first replica of the path, its labels to the one with the head.

    `part` is where its samples lie in the microbatches of the plan.
    """

    key: StepKey
    microbatch: int
    part: MicrobatchPart
    inputs_to: PeerId
    labels_to: PeerId


@dataclass(frozen=True, slots=True)
class Dial:
    """Effect: connect to a peer that was lost; `peer_found` or `peer_lost` follows.

    No step waits for it: a peer that is frozen, or cut off, answers a connection only after seconds, or never.
    """

    to: PeerId


@dataclass(frozen=True, slots=True)
class Finished:
    """The step is over.

    Attributes:
        key: The step with its last attempt.
        path: The replicas of the last attempt.
        loss: Mean over the step's targets.
        grad_norm: Over all stages, before clipping.
        skipped: Committed without effect, because a gradient was not finite.
        committed: Some replica has applied it. Otherwise none of the path could say, and the round's record decides.
        routers: Of all layers with experts, in order.
    """

    key: StepKey
    path: tuple[PeerId, ...]
    loss: float
    grad_norm: float
    skipped: bool
    committed: bool
    attempts: int
    num_samples: int
    num_targets: int
    routers: tuple[RouterReport, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundOver:
    """The round is closed, as this replica has said last; the step is applied nowhere."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class NoPath:
    """There is no complete path; `stages` have no replica that can be used. The step is applied nowhere.

    `refusal` is why a replica of the only stage would not have it; empty: that was not the reason. So many of its
    replicas, out of all, have refused it. `is_model`: all of them, since the model of the user's own fails.
    """

    stages: tuple[int, ...]
    refusal: str = ""
    num_refusing: int = 0
    num_replicas: int = 0
    is_model: bool = False


TrainerEffect = SendStepMessage | Note | FeedMicrobatch | Dial
StepEnd = Finished | RoundOver | NoPath


class StepPhase(enum.Enum):
    """See the diagram above."""

    IDLE = enum.auto()
    WAITING = enum.auto()
    OPENING = enum.auto()
    RUNNING = enum.auto()
    COMMITTING = enum.auto()


@dataclass(kw_only=True, eq=False, repr=False)
class StepTrainer:
    """Drives the steps of one trainer; between steps it remembers which peers to avoid.

    Attributes:
        ended: how the step ended; None while it goes on.
        wake_at_s: when to call `tick` if no event comes before (monotonic).
    """

    trainer: int
    generation: int
    window: int | None
    max_grad_norm: float | None
    step_timeout_s: float
    is_wrapped: bool = False

    def __post_init__(self) -> None:
        self._flight = FlightWindow(math.inf if self.window is None else self.window)
        # Where on a path the loss is computed.
        self._head = 0 if self.is_wrapped else -1
        self._avoidance = Avoidance()
        self._caps = KnownCaps()
        self._phase = StepPhase.IDLE
        self._plan: StepPlan | None = None
        self._hops: dict[PeerId, Hop] = {}
        self._key = StepKey(self.trainer, self.generation, -1, -1)
        self._attempts = self._busy = self._refusals = 0
        self._give_up_s = math.inf
        self._given_up_by = set[PeerId]()
        # Which replica of which stage has refused this step, and whether for the model; and over whom it has failed.
        self._refusing = dict[tuple[int, PeerId], bool]()
        self._failed_over = dict[int, set[PeerId]]()
        # Who has said of which round that it is closed.
        self._closed_round, self._closed = 0, set[PeerId]()
        self._clear_attempt(())
        self.ended: StepEnd | None = None
        self.wake_at_s = math.inf

    def _clear_attempt(self, path: tuple[PeerId, ...], parts: tuple[MicrobatchPart, ...] = ()) -> None:
        self._path = path
        self._parts = parts
        self._opened: set[PeerId] = set()
        self._fed = 0
        self._prepared: dict[int, Prepared] = {}
        self._commit: Commit | None = None
        self._answers: dict[PeerId, bool] = {}
        self._lost: set[PeerId] = set()

    def is_current(self, key: StepKey) -> bool:
        """Whether this attempt is under way: what is said of another one comes too late."""
        return self._plan is not None and key == self._key

    # ---- events

    def start(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        """Begins a step. A step that ended without a commit may be started again; its attempts count on."""
        if plan.number != self._key.number:
            self._key = StepKey(self.trainer, self.generation, plan.number, -1)
        self._plan = plan
        if plan.round != self._closed_round:
            self._closed_round, self._closed = plan.round, set[PeerId]()
        self._caps.told(plan.replicas)
        listed = [replica.hop for stage in plan.replicas for replica in stage]
        # A home replica that was started again since the round began is elsewhere now.
        self._hops = {hop.peer: hop for hop in (*plan.home, *listed)}
        self._attempts = self._busy = self._refusals = 0
        self._given_up_by.clear()
        self._refusing.clear()
        self._failed_over.clear()
        self._give_up_s = now_s + self.step_timeout_s
        dials = [Dial(peer) for peer in self._avoidance.look_for([hop.peer for hop in listed], now_s)]
        self._avoidance.forget_ended(now_s)
        self._avoidance.forget_losses()
        self.ended = None
        return [*dials, *self._open(plan, now_s)]

    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[TrainerEffect]:
        """Takes a message; those of another attempt, or of a peer that is not on the path, mean nothing."""
        plan = self._plan
        if plan is None or sender not in self._path or getattr(message, "key", None) != self._key:
            return []
        if self._phase == StepPhase.COMMITTING:
            if isinstance(message, Committed | Aborted):
                self._answers[sender] = isinstance(message, Committed)
                return self._conclude(plan, now_s)
            return []
        if self._phase not in (StepPhase.OPENING, StepPhase.RUNNING):
            return []
        match message:
            case Opened(room=room):
                self._opened.add(sender)
                self._flight.opened(sender, room)
            case MicrobatchDone(microbatch=microbatch) if sender == self._path[0]:
                self._flight.done(microbatch, now_s)
            case Prepared(stage=stage) if 0 <= stage < len(self._path) and self._path[stage] == sender:
                self._prepared[stage] = message
            case Busy():
                self._busy += 1
                pause_s = min(_MAX_BUSY_S, _FIRST_BUSY_S * 2 ** min(self._busy, 16))
                self._avoidance.avoid(sender, now_s + pause_s)
                return self._again(plan, now_s)
            case Refused():
                return self._refused(plan, sender, message, now_s)
            case Broken(peer=peer) if self._are_neighbours(sender, peer):
                self._avoidance.avoid_pair(sender, peer, now_s + _BROKEN_S)
                self._avoidance.suspect_pair(sender, peer, now_s + _SUSPECT_PAIR_S)
                return self._again(plan, now_s)
            case Aborted():
                # Any other one of the path can have asked it for that.
                return self._set_back(plan, sender, self._path, now_s)
            case Broken():
                return self._set_back(plan, sender, (sender,), now_s)
            case _:
                return []
        return self._go_on(plan, now_s)

    def lost(self, peer: PeerId, now_s: float) -> list[TrainerEffect]:
        """The connection to `peer` has ended."""
        self._avoidance.lose(peer, now_s + _LOST_S)
        self._caps.forget(peer)
        self._flight.lost(peer)
        if self._plan is None or peer not in self._path:
            return []
        if self._phase == StepPhase.COMMITTING:
            if peer not in self._answers:
                self._lost.add(peer)
            return self._conclude(self._plan, now_s)
        return self._again(self._plan, now_s) if self._phase in (StepPhase.OPENING, StepPhase.RUNNING) else []

    def peer_found(self, peer: PeerId) -> None:
        """There is a connection with `peer`: steps may run over it as before."""
        self._avoidance.found(peer)

    def tick(self, now_s: float) -> list[TrainerEffect]:
        """Time has passed."""
        plan = self._plan
        if plan is None or now_s < self.wake_at_s:
            return []
        if self._phase == StepPhase.WAITING:
            return self._open(plan, now_s)
        if self._phase == StepPhase.COMMITTING:
            return self._repeat_commit(now_s)
        for stage, peer in enumerate(self._path):
            late = peer not in self._opened if self._phase == StepPhase.OPENING else stage not in self._prepared
            if late:
                self._avoidance.suspect(peer, now_s + _SUSPECT_S)
        return self._again(plan, now_s)

    def round_begun(self, round: int) -> list[TrainerEffect]:
        """The client has begun a round: if a replica has said that the one before is closed, it is."""
        is_over = self._plan is not None and self._closed_round < round and bool(self._closed)
        if not is_over or self._phase == StepPhase.COMMITTING:
            return []
        aborts = self._aborts()
        self._end(RoundOver(min(self._closed)))
        return aborts

    def cancel(self) -> list[TrainerEffect]:
        """The step is given up by its caller; what has been committed stands."""
        sends = self._aborts() if self._phase in (StepPhase.OPENING, StepPhase.RUNNING) else []
        self._plan, self._phase, self.wake_at_s = None, StepPhase.IDLE, math.inf
        return sends

    # ---- an attempt

    def _open(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        found = candidates(plan.home, plan.replicas, self._closed)
        path = choose_path(found, self._avoidance, now_s, closes=self.is_wrapped)
        if path is None:
            return self._wait(found, now_s)
        return self._open_over(path, plan, now_s)

    def _open_over(self, path: tuple[PeerId, ...], plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        self._key = self._key._replace(attempt=self._key.attempt + 1)
        self._attempts += 1
        whole_sizes = tuple(len(targets) for targets in plan.microbatch_targets)
        self._clear_attempt(path, cut(whole_sizes, self._caps.smallest(path)))
        self._flight.begin(path)
        self._phase = StepPhase.OPENING
        self.wake_at_s = now_s + self.step_timeout_s
        hops = tuple(self._hops[peer] for peer in path)
        sizes = tuple(part.num_samples for part in self._parts)
        targets = tuple(sum(plan.microbatch_targets[part.whole][part.start : part.stop]) for part in self._parts)
        said = plan.samples, plan.base, plan.loss_scale, plan.warrant
        request = Open(self._key, plan.round, hops, sizes, targets, *said)
        effects: list[TrainerEffect] = [Note(self._key, hops), *(SendStepMessage(peer, request) for peer in path)]
        # Who hears of a microbatch before the step keeps it, so there is no need to wait for a round trip. If something
        # was in the way of the attempt before, nothing is computed until all have agreed.
        return [*effects, *self._feed(now_s)] if self._attempts == 1 or len(path) == 1 else effects

    def _wait(self, found: list[list[PeerId]], now_s: float) -> list[TrainerEffect]:
        """No path now: wait for a replica that may be tried again soon, but not too long."""
        self._clear_attempt(())
        unusable = [all(not self._avoidance.is_usable(peer, now_s) for peer in peers) or not peers for peers in found]
        lost = [all(self._avoidance.is_lost(peer, now_s) for peer in peers) for peers in found]
        next_s = self._avoidance.next_end_s(now_s)
        if any(lost):
            self._give_up_s = min(self._give_up_s, now_s + _LOST_PATIENCE_S)
        if now_s >= self._give_up_s or next_s == math.inf:
            named = lost if any(lost) else unusable if any(unusable) else [True] * len(found)
            self._end(NoPath(tuple(stage for stage, is_named in enumerate(named) if is_named)))
        else:
            self._phase = StepPhase.WAITING
            self.wake_at_s = min(next_s, self._give_up_s)
        return []

    def _again(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        return [*self._aborts(), *self._open(plan, now_s)]

    def _aborts(self) -> list[TrainerEffect]:
        # Also to a peer that has just been lost: it is not sent then, and its end settles the attempt by itself.
        return [SendStepMessage(peer, Abort(self._key)) for peer in self._path]

    def _are_neighbours(self, one: PeerId, other: PeerId) -> bool:
        if other not in self._path:
            return False
        distance = abs(self._path.index(one) - self._path.index(other))
        return distance == 1 or (self.is_wrapped and distance == len(self._path) - 1 > 0)

    def _set_back(
        self, plan: StepPlan, sender: PeerId, suspects: tuple[PeerId, ...], now_s: float
    ) -> list[TrainerEffect]:
        """Begin another attempt; over others than the suspects if this replica has given up an earlier one as well."""
        if not self._gave_up_before(sender):
            return self._again(plan, now_s)
        for peer in suspects:
            self._avoidance.suspect(peer, now_s + _SUSPECT_S)
        return self._refused(plan, sender, Refused(self._key, "it gives up every attempt"), now_s)

    def _gave_up_before(self, peer: PeerId) -> bool:
        """Note that a replica has given an attempt of this step up; return whether it has done that before."""
        before = peer in self._given_up_by
        self._given_up_by.add(peer)
        return before

    def _refused(self, plan: StepPlan, sender: PeerId, message: Refused, now_s: float) -> list[TrainerEffect]:
        if message.reason == CLOSED:
            return self._closed_at(sender, plan, now_s)
        if message.cap is not None and message.cap < max(part.num_samples for part in self._parts):
            # It takes the batch in smaller parts, at once.
            self._caps.lower(sender, message.cap)
            return self._again(plan, now_s)
        self._avoidance.avoid(sender, now_s + _REFUSED_S)
        if message.reason != BEHIND:
            self._avoidance.suspect(sender, now_s + _SUSPECT_S)
            stage = self._path.index(sender)
            is_model = self._note_refusal(plan, stage, sender, message, now_s)
            if is_model or self._refusals > _MAX_REFUSALS:
                aborts, reason = self._aborts(), message.reason[:_MAX_REASON_CHARS]
                refusing = {peer for of_stage, peer in self._refusing if of_stage == stage}
                num_replicas = len(refusing | self._listed(plan, stage))
                self._end(NoPath((stage,), reason, len(refusing), num_replicas, is_model))
                return aborts
        return self._again(plan, now_s)

    def _note_refusal(self, plan: StepPlan, stage: int, sender: PeerId, message: Refused, now_s: float) -> bool:
        """Note who refuses the step; return whether every replica of its stage does, since the user's model fails.

        Of two others of each stage one may send what the model fails on: with all that could be found out, it has
        failed over both. A replica that takes no part now, or is lost, has not refused.
        """
        if not message.is_model or (stage, sender) in self._refusing:
            self._refusals += 1
        self._refusing[stage, sender] = message.is_model
        if not message.is_model:
            return False
        over = self._failed_over.setdefault(stage, set())
        over.update(self._path)
        listed = self._listed(plan, stage)
        if not listed or not all(self._refusing.get((stage, peer), False) for peer in listed):
            return False
        others = [self._listed(plan, other) for other in range(len(self._path)) if other != stage]
        if all(len(peers & over) >= min(2, len(peers)) for peers in others):
            return True
        for peer in self._path:
            self._avoidance.suspect(peer, now_s + _SUSPECT_S)
        return False

    @staticmethod
    def _listed(plan: StepPlan, stage: int) -> set[PeerId]:
        """Return the replicas of a stage that the client has told of."""
        return {replica.hop.peer for replica in plan.replicas[stage]} if stage < len(plan.replicas) else set()

    def _closed_at(self, sender: PeerId, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        """Believe it, or try once whether it is closed at others too: those from which an answer comes at once."""
        aborts, is_first = self._aborts(), not self._closed
        self._closed.add(sender)
        found = candidates(plan.home, plan.replicas, self._closed)
        path = choose_path(found, self._avoidance, now_s, closes=self.is_wrapped) if is_first else None
        # One that is frozen would answer much later, when the next round has begun.
        is_sound = path is not None and is_undoubted(path, self._avoidance, now_s, closes=self.is_wrapped)
        if path is None or sender in path or not is_sound:
            self._end(RoundOver(sender))
            return aborts
        return [*aborts, *self._open_over(path, plan, now_s)]

    def _go_on(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        self.wake_at_s = now_s + self.step_timeout_s
        if len(self._opened) < len(self._path):
            return []
        self._phase = StepPhase.RUNNING
        self._give_up_s = now_s + self.step_timeout_s
        if len(self._prepared) == len(self._path):
            self._flight.trained()
            return self._first_commit(plan)
        return self._feed(now_s)

    def _feed(self, now_s: float) -> list[TrainerEffect]:
        """Send as many microbatches as may be in flight."""
        effects: list[TrainerEffect] = []
        while self._fed < len(self._parts) and self._flight.may_feed():
            part, first, head = self._parts[self._fed], self._path[0], self._path[self._head]
            effects.append(FeedMicrobatch(self._key, self._fed, part, first, head))
            self._flight.fed(now_s)
            self._fed += 1
        return effects

    # ---- the commit

    def _first_commit(self, plan: StepPlan) -> list[TrainerEffect]:
        is_finite = all(prepared.finite for prepared in self._prepared.values())
        decision = decision_of(self._norm(), is_finite, plan.lr, self.max_grad_norm)
        self._commit = Commit(self._key, decision.scale, decision.lr, decision.skipped)
        self._phase = StepPhase.COMMITTING
        return [SendStepMessage(peer, self._commit) for peer in self._path]

    def _norm(self) -> float:
        return gradient_norm(self._prepared[stage].squared_norm for stage in range(len(self._path)))

    def _repeat_commit(self, now_s: float) -> list[TrainerEffect]:
        self.wake_at_s, commit = now_s + self.step_timeout_s, self._commit
        silent = [peer for peer in self._path if peer not in self._answers and peer not in self._lost]
        return [] if commit is None else [SendStepMessage(peer, commit) for peer in silent]

    def _conclude(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        is_committed = any(self._answers.values())
        if not is_committed and len(self._answers.keys() | self._lost) < len(self._path):
            return []
        if not is_committed and not self._lost:
            # Surely applied nowhere: train the batch again, over others if these do that each time.
            for peer in self._path:
                if self._gave_up_before(peer):
                    self._avoidance.suspect(peer, now_s + _SUSPECT_S)
            return self._open(plan, now_s)
        loss = self._prepared[range(len(self._path))[self._head]].loss
        routers = tuple(each for stage in range(len(self._path)) for each in self._prepared[stage].routers)
        finished = Finished(
            key=self._key,
            path=self._path,
            loss=math.nan if loss is None else loss,
            grad_norm=self._norm(),
            skipped=self._commit is not None and self._commit.skipped,
            committed=is_committed,
            attempts=self._attempts,
            num_samples=sum(map(len, plan.microbatch_targets)),
            num_targets=sum(map(sum, plan.microbatch_targets)),
            routers=routers[:_MAX_ROUTERS],
        )
        self._end(finished)
        return []

    def _end(self, end: StepEnd) -> None:
        self.ended = end
        self._plan, self._phase, self.wake_at_s = None, StepPhase.IDLE, math.inf
