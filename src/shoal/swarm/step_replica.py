"""The replica's side of the training step (docs/protocol.md, "The training step") as a machine without I/O.

Messages, losses and finished operations go in; messages to send come out, and `ready` tells what the device could do.
The rules that keep a step atomic whoever dies:

- An attempt is opened once: every Open of a trainer must be newer than all that it has opened or ended here.
- A commit waits for every other step that has begun and is not prepared, so a step sees one version of the weights.
- A trainer goes on when one replica has committed; here its next step begins when the one before is over here, too.
- A decision is final. Without its trainer, an unprepared step aborts alone; a prepared one asks the path, and asking or
  answering "not committed" is a promise that only this settlement (`settlement.py`), or the round, decides it here.
- From its join to the next record a replica decides nothing by itself.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.microbatch_cut import exceeded, refusal
from shoal.swarm.microbatch_pass import MicrobatchPass, Payload
from shoal.swarm.open_step import AttemptLedger, OpenStep, entry_bytes, keys_below
from shoal.swarm.settlement import Settlement
from shoal.swarm.step_operations import (
    BEHIND,
    CLOSED,
    MALFORMED,
    STALE,
    UNKNOWN,
    Decision,
    Operation,
    OperationKind,
    ReadyOperation,
    Schedule,
    SendStepMessage,
    StepTotals,
    is_loss_scale,
)
from shoal.wire.messages.step import (
    Abort,
    Aborted,
    AskOutcome,
    Backward,
    Broken,
    Busy,
    Commit,
    Committed,
    Fence,
    Fenced,
    Forward,
    Labels,
    Open,
    Opened,
    Outcome,
    Prepared,
    Refused,
    StepEntry,
    StepMessage,
    StepsTrained,
    TellOutcome,
)

MAX_LOG_BYTES = 12 << 20
"""Of the log that a replica joins with, in one message, and of what is open and may come into it."""
_REMIND_S = 0.5
"""Between two questions for the fate of a step in doubt."""


@dataclass(eq=False, repr=False)
class StepReplica:
    """All steps of one replica of stage `stage`.

    Attributes:
        round: the round that the replica is in; 0 before it holds D_0.
        log: steps committed in this round, in apply order; its length is the version of the parameters.
        earlier: what was trained in earlier rounds of which some fragment is still to be averaged; the oldest first.
        cuts: which steps the average of a round has.
        cap: the most samples in a microbatch; None: any number. The driver may lower it.
        room: the most microbatches that a step has in flight here; None: any number. The driver may lower it.
        open: attempts that are neither applied nor aborted, in the order in which they were opened.
    """

    me: PeerId
    _: KW_ONLY
    stage: int
    num_stages: int
    max_open_steps: int
    max_microbatch_samples: int | None = None
    room: int | None = None
    schedule: Schedule = Schedule.ONE_F_ONE_B
    is_wrapped: bool = False
    cuts: CutRule = EVERY_STEP

    def __post_init__(self) -> None:
        self.cap = self.max_microbatch_samples
        self.round, self.base = 0, ""
        self.log: list[StepEntry] = []
        self._log_bytes = 0
        self.earlier: tuple[StepsTrained, ...] = ()
        self.open: dict[StepKey, OpenStep] = {}
        self._closing = False
        self._joined = False
        self._num_opened = 0
        self._remind_at_s = math.inf
        self._drops: list[StepKey] = []
        self._ledger = AttemptLedger()

    @property
    def version(self) -> int:
        """Commits applied since the round started."""
        return len(self.log)

    @property
    def in_doubt(self) -> tuple[StepKey, ...]:
        """Prepared attempts whose trainer is lost and whose fate is not known."""
        return tuple(key for key, step in self.open.items() if step.in_doubt)

    @property
    def closed(self) -> bool:
        """The round is closing and nothing but doubt is open."""
        return self._closing and all(step.in_doubt for step in self.open.values())

    @property
    def wake_at_s(self) -> float:
        """When to call `tick` (monotonic); infinite while nothing is in doubt."""
        return self._remind_at_s if self.in_doubt else math.inf

    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[SendStepMessage]:
        """Takes a message of `sender`.

        Raises:
            RemoteProtocolError: The sender broke the protocol.
        """
        match message:
            case Open():
                return self._on_open(sender, message, now_s)
            case Forward() | Labels() | Backward():
                return self._on_payload(sender, message)
            case Commit():
                return self._on_commit(sender, message)
            case Abort(key):
                return self._on_abort(sender, key)
            case AskOutcome():
                return self._on_ask(sender, message, now_s)
            case TellOutcome():
                return self._on_tell(sender, message)
            case Refused(key):
                return self._on_refused(sender, key)
            case Fence(generations):
                return self._on_fence(sender, generations, now_s)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a replica")

    def awaits(self, key: StepKey) -> bool:
        """Whether an attempt may still be opened here: what comes for it until then is early (`EarlyPayloads`)."""
        return self._ledger.is_new(key) and not self._ledger.is_fenced(key)

    def wanted_by(self, sender: PeerId, message: Payload) -> MicrobatchPass | None:
        """Which pass of an open step still waits for the tensor of `message`."""
        step = self.open.get(message.key)
        found = None if step is None else step.pass_of(sender, message)
        return None if found is None or found.has(message) else found

    def _on_open(self, sender: PeerId, request: Open, now_s: float) -> list[SendStepMessage]:
        key = request.key
        if key in self.open and self.open[key].trainer == sender:
            return [SendStepMessage(sender, Opened(key, self.room or 0))]
        reason = self._refusal(sender, request)
        if reason is not None:
            return [SendStepMessage(sender, Refused(key, reason, exceeded(request.microbatch_samples, self.cap)))]
        sends: list[SendStepMessage] = []
        if key.generation > self._ledger.lowest_generation(key.trainer):
            # A new generation has taken the old one's place.
            sends += self._fence({key.trainer: key.generation}, now_s)
        if self._num_held(key.trainer) >= self.max_open_steps:
            return [*sends, SendStepMessage(sender, Busy(key))]
        self._ledger.opened(key)
        self.open[key] = OpenStep(request, sender, self.stage, self._num_opened, self.schedule, self.is_wrapped)
        self._num_opened += 1
        return [*sends, SendStepMessage(sender, Opened(key, self.room or 0))]

    def _num_held(self, trainer: int) -> int:
        """How many steps need memory beside a new one of this trainer. One that is decided needs its memory until it is
        applied, and until then the next one of its trainer needs none."""
        held = {key: step for key, step in self.open.items() if not step.settling}
        going = [key.trainer for key, step in held.items() if step.decision is None]
        decided = {key.trainer for key, step in held.items() if step.decision is not None}
        return len(going) + len(decided - {trainer, *going})

    def _refusal(self, sender: PeerId, request: Open) -> str | None:
        if self._ledger.is_fenced(request.key) or not self._ledger.may_open(sender, request.key):
            return STALE
        if request.round > self.round or (request.round == self.round and request.base != self.base):
            return BEHIND
        if request.round < self.round or self._closing or self._is_full(request):
            return CLOSED
        if len(request.path) != self.num_stages or request.path[self.stage].peer != self.me:
            return MALFORMED
        if not is_loss_scale(request.loss_scale):
            return MALFORMED
        return refusal(request.microbatch_samples, request.microbatch_targets, self.cap)

    def _is_full(self, request: Open) -> bool:
        """Whether the log would be too long to be joined with: whoever has steps here says how long they are."""
        open_bytes = sum(step.entry_bytes for step in self.open.values())
        new_bytes = entry_bytes((hop.peer for hop in request.path), request.samples)
        return self._log_bytes + open_bytes + new_bytes > MAX_LOG_BYTES

    def _on_payload(self, sender: PeerId, message: Payload) -> list[SendStepMessage]:
        step = self.open.get(message.key)
        if step is None:
            # Late messages of an aborted attempt are nothing; for one that is not opened yet the driver had no room.
            return [SendStepMessage(sender, Refused(message.key, UNKNOWN))] if self.awaits(message.key) else []
        own = step.pass_of(sender, message)
        if own is None:
            raise RemoteProtocolError(
                f"{type(message).__name__} {message.microbatch} of {message.key} does not come from {sender}"
            )
        own.note(message)
        if self.room is not None and max(each.num_held for each in step.passes) > self.room:
            # Its trainer has sent more than this replica says that it holds, or said before it had less memory.
            self._remove(step)
            return [SendStepMessage(step.trainer, Busy(message.key))]
        return own.answers(message)

    def _on_commit(self, sender: PeerId, message: Commit) -> list[SendStepMessage]:
        key = message.key
        if self._ledger.committed(key) is not None:
            return [SendStepMessage(sender, Committed(key))]
        step = self.open.get(key)
        if step is None:
            self._ledger.end(sender, key)
            self._ledger.deny(key)
            return [SendStepMessage(sender, Aborted(key))]
        decision = Decision(message.scale, message.lr, message.skipped)
        if sender != step.trainer or not step.prepared or not decision.is_sane:
            raise RemoteProtocolError(f"Commit of {key} with {decision} by {sender}, prepared: {step.prepared}")
        step.commit_asked = True
        if not step.settling and step.decision is None:
            step.decision = decision
        return []

    def _on_abort(self, sender: PeerId, key: StepKey) -> list[SendStepMessage]:
        step = self.open.get(key)
        if step is None:
            self._ledger.end(sender, key)
            return []
        if sender == step.trainer and step.decision is None and not self._joined:
            self._remove(step)
        return []

    def _on_refused(self, sender: PeerId, key: StepKey) -> list[SendStepMessage]:
        if (step := self.open.get(key)) is None or step.prepared or sender not in step.neighbours:
            return []
        return [SendStepMessage(step.trainer, Broken(key, sender))]

    # ---- settlement

    def _on_ask(self, sender: PeerId, message: AskOutcome, now_s: float) -> list[SendStepMessage]:
        key = message.key
        if (decision := self._decision_of(key)) is not None:
            return [
                SendStepMessage(
                    sender, TellOutcome(key, Outcome.COMMITTED, decision.scale, decision.lr, decision.skipped)
                )
            ]
        if (step := self.open.get(key)) is not None and sender not in step.path:
            return []
        if step is not None and step.prepared:
            is_known, settlement = step.settling, self._doubt(step, now_s)
            is_known &= not settlement.learn(message.forgotten)
            sends = [SendStepMessage(sender, TellOutcome(key, Outcome.NOT_COMMITTED, forgotten=settlement.forgotten))]
            return sends if is_known else [*sends, *(step.questions() or self._abort_if_all_deny(step))]
        outcome = Outcome.ABORTED if self._ledger.remembers(key) else Outcome.FORGOTTEN
        self._ledger.answer(sender, key)
        sends = [SendStepMessage(sender, TellOutcome(key, outcome))]
        if step is not None:
            self._remove(step)
            sends.append(SendStepMessage(step.trainer, Aborted(key)))
        return sends

    def _on_tell(self, sender: PeerId, message: TellOutcome) -> list[SendStepMessage]:
        if (step := self.open.get(message.key)) is None or not step.in_doubt or self._joined or sender not in step.path:
            return []
        decision, settlement = Decision(message.scale, message.lr, message.skipped), step.settle()
        if message.outcome == Outcome.COMMITTED and not decision.is_sane:
            raise RemoteProtocolError(f"{message.key} cannot be committed with {decision}")
        forgotten = (sender, *message.forgotten) if message.outcome == Outcome.FORGOTTEN else message.forgotten
        is_news = settlement.learn(forgotten)
        counts = settlement.hear(sender, message.outcome, forgotten)
        if message.outcome == Outcome.COMMITTED and counts:
            step.decision = decision
            return []
        return (step.questions() if is_news else []) or self._abort_if_all_deny(step)

    def _settle(self, step: OpenStep, now_s: float) -> list[SendStepMessage]:
        """The trainer decides no more: abort an unprepared step, ask the path about a prepared one."""
        if step.decision is not None or step.settling:
            return []
        if not step.prepared:
            self._remove(step)
            return []
        self._doubt(step, now_s)
        return step.questions() or self._abort_if_all_deny(step)

    def _doubt(self, step: OpenStep, now_s: float) -> Settlement:
        if not self.in_doubt:
            self._remind_at_s = now_s + _REMIND_S
        return step.settle()

    def _abort_if_all_deny(self, step: OpenStep) -> list[SendStepMessage]:
        return [] if self._joined or step.questions() else self._deny(step)

    def tick(self, now_s: float) -> list[SendStepMessage]:
        """Asks again for the fate of every step in doubt: a silent replica may be back."""
        self._remind_at_s = now_s + _REMIND_S
        return [send for step in self.open.values() if step.in_doubt for send in step.questions()]

    def lost(self, peer: PeerId, now_s: float) -> list[SendStepMessage]:
        """The connection to `peer` has ended."""
        self._ledger.forget(peer)
        sends: list[SendStepMessage] = []
        for key, step in list(self.open.items()):
            if step.trainer == peer:
                sends += self._settle(step, now_s)
            elif not step.prepared and peer in step.neighbours:
                sends.append(SendStepMessage(step.trainer, Broken(key, peer)))
        return sends

    def _on_fence(self, sender: PeerId, generations: dict[int, int], now_s: float) -> list[SendStepMessage]:
        sends, ledger = self._fence(generations, now_s), self._ledger
        committed, in_doubt = ledger.committed_below(generations), keys_below(self.open, generations)
        fenced = Fenced(generations, committed, in_doubt, self.round, ledger.since(generations), ledger.is_steady)
        return [*sends, SendStepMessage(sender, fenced)]

    def _fence(self, generations: dict[int, int], now_s: float) -> list[SendStepMessage]:
        self._ledger.fence(generations)
        sends: list[SendStepMessage] = []
        for step in list(self.open.values()):
            if self._ledger.is_fenced(step.request.key):
                sends += self._settle(step, now_s)
        return sends

    # ---- operations

    def ready(self) -> list[ReadyOperation]:
        """Everything that the device could do now."""
        found = [ReadyOperation(Operation(OperationKind.DROP, key), True, -1) for key in self._drops]
        unprepared = any(step.begun and not step.prepared for step in self.open.values())
        trainers: set[int] = set()  # of steps that are not over, and were opened before
        for key, step in self.open.items():
            if step.decision is not None and not unprepared:
                found.append(
                    ReadyOperation(Operation(OperationKind.COMMIT, key, decision=step.decision), True, step.opened)
                )
            elif step.begun or key.trainer not in trainers:
                found += step.ready()
            if not step.in_doubt:
                trainers.add(key.trainer)
        return found

    def started(self, operation: Operation) -> None:
        """The device begins an operation out of `ready`; no other starts before this one has finished or failed."""
        if operation.kind == OperationKind.DROP:
            self._drops.remove(operation.key)
        elif operation.kind != OperationKind.COMMIT and not self.open[operation.key].begun:
            self.open[operation.key].version = self.version

    def finished(self, operation: Operation, totals: StepTotals | None) -> list[SendStepMessage]:
        """The device has done an operation; `totals` belong to the one that completes a step's gradients.

        Results of an attempt that was aborted meanwhile are to be thrown away: then nothing is sent.
        """
        step = self.open.get(operation.key)
        if operation.kind == OperationKind.COMMIT:
            return [] if step is None else self._applied(step)
        if operation.kind == OperationKind.DROP or step is None:
            return []
        sends = step.done(operation)
        if totals is not None:
            step.prepared = True
            sums = (totals.squared_norm, totals.finite, totals.loss, totals.routers)
            sends.append(SendStepMessage(step.trainer, Prepared(operation.key, self.stage, step.version, *sums)))
        return sends

    def refuse(self, key: StepKey, reason: str, *, is_model: bool = False) -> list[SendStepMessage]:
        """Gives an unprepared attempt up: a tensor does not fit, or the device or the user's own model failed on it."""
        step = self.open.get(key)
        if step is None or step.prepared:
            return []
        self._remove(step)
        cap = exceeded(step.request.microbatch_samples, self.cap)
        return [SendStepMessage(step.trainer, Refused(key, reason, cap, is_model))]

    def _applied(self, step: OpenStep) -> list[SendStepMessage]:
        decision, key = step.decision, step.request.key
        if decision is None:
            return []
        self.log.append(step.entry(decision))
        self._log_bytes += step.entry_bytes
        self._ledger.commit(key, decision)
        del self.open[key]
        return [SendStepMessage(step.trainer, Committed(key))] if step.commit_asked else []

    # ---- the round

    def close(self) -> list[SendStepMessage]:
        """Opens no more steps in this round and drops those not begun; `closed` tells when the rest is done."""
        self._closing = True
        sends: list[SendStepMessage] = []
        for key, step in list(self.open.items()):
            if not step.begun:
                self._remove(step)
                sends.append(SendStepMessage(step.trainer, Refused(key, CLOSED)))
        return sends

    def join(self) -> None:
        """From now on only `resolve` decides, until the next round."""
        self._joined = True

    def resolve(self, key: StepKey, decision: Decision | None) -> list[SendStepMessage]:
        """The round has settled a step in doubt: committed with `decision`, aborted with None."""
        step = self.open.get(key)
        if step is None or step.decision is not None:
            return []
        if decision is None:
            return self._deny(step)
        step.decision = decision
        return []

    def start_round(self, round: int, base: str = "", keeps_rest: bool = False) -> list[SendStepMessage]:
        """The replica holds D_{round-1}, whose hash is `base`: what is open is decided by that record, and dropped.

        Args:
            keeps_rest: Its parameters are still its own but for the fragment of that record (`Swap`).
        """
        sends: list[SendStepMessage] = []
        for key, step in list(self.open.items()):
            self._remove(step)
            answer = Aborted(key) if step.commit_asked else Refused(key, CLOSED)
            sends.append(SendStepMessage(step.trainer, answer))
        self.earlier = self.cuts.still_earlier(self.round, self.earlier, self.log) if keeps_rest else ()
        self.round, self.base, self.log, self._log_bytes = round, base, [], 0
        self._ledger.start_round(round)
        self._closing = self._joined = False
        return sends

    def resume(self, log: tuple[StepEntry, ...], earlier: tuple[StepsTrained, ...] = ()) -> bool:
        """Right after `start_round`: go on after these commits of an earlier generation; False if one was denied."""
        is_taken = self._ledger.resume(log)
        self.log, self.earlier = (list(log), earlier) if is_taken else ([], ())
        self._log_bytes = sum(entry_bytes(entry.path, entry.samples) for entry in self.log)
        return bool(self.log)

    def forget_earlier(self) -> None:
        """The parameters are those of the record, in all fragments."""
        self.earlier = ()

    def _decision_of(self, key: StepKey) -> Decision | None:
        step = self.open.get(key)
        return self._ledger.committed(key) if step is None else step.decision

    def _deny(self, step: OpenStep) -> list[SendStepMessage]:
        self._remove(step)
        return [SendStepMessage(step.trainer, Aborted(step.request.key))] if step.commit_asked else []

    def _remove(self, step: OpenStep) -> None:
        del self.open[step.request.key]
        self._drops.append(step.request.key)
