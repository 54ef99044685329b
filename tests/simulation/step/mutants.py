"""The step's rules, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

from tests.simulation.step.hosts import Chain, ReplicaHost, Work
from tests.simulation.step.world import World

from shoal.ids import PeerId, StepKey
from shoal.swarm.flight_window import FlightWindow
from shoal.swarm.microbatch_pass import Payload
from shoal.swarm.open_step import AttemptLedger
from shoal.swarm.step_operations import Operation, OperationKind, ReadyOperation, Schedule, SendStepMessage, StepTotals
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import FeedMicrobatch, StepPhase, StepPlan, StepTrainer, TrainerEffect
from shoal.wire.messages.base import ReplicaRef
from shoal.wire.messages.step import AskOutcome, Backward, Open, Outcome, Refused, StepMessage, TellOutcome

Make = Callable[[int], World]


class CommitsWithoutAllMicrobatches(StepReplica):
    def finished(self, operation: Operation, totals: StepTotals | None) -> list[SendStepMessage]:
        if operation.kind in (OperationKind.BACKWARD, OperationKind.LOSS) and operation.microbatch == 1:
            totals = StepTotals(1.0, True, 1.0)
        return super().finished(operation, totals)


class CommitsWhenItsHeadIsDone(StepReplica):
    """Of a wrapped step, without what its other units have still to compute."""

    def finished(self, operation: Operation, totals: StepTotals | None) -> list[SendStepMessage]:
        step = self.open.get(operation.key)
        if operation.is_head and step is not None and step.passes[-1].completes(operation):
            totals = StepTotals(1.0, True, 1.0)
        return super().finished(operation, totals)


class CommitsWithoutAllWeightGradients(StepReplica):
    def finished(self, operation: Operation, totals: StepTotals | None) -> list[SendStepMessage]:
        step = self.open.get(operation.key)
        if (
            operation.kind == OperationKind.BACKWARD
            and step is not None
            and step.passes[0].backwards == step.passes[0].num_microbatches - 1
        ):
            totals = StepTotals(1.0, True, 1.0)
        return super().finished(operation, totals)


class AddsWeightGradientsTwice(StepReplica):
    def finished(self, operation: Operation, totals: StepTotals | None) -> list[SendStepMessage]:
        sends = super().finished(operation, totals)
        step = self.open.get(operation.key)
        if operation.kind == OperationKind.WEIGHTS and step is not None and not step.prepared:
            step.passes[-1 if operation.is_head else 0].weights = operation.microbatch
        return sends


class CommitsWhileAnotherStepHasBegun(StepReplica):
    def ready(self) -> list[ReadyOperation]:
        ready = super().ready()
        for key, step in self.open.items():
            if step.decision is not None:
                ready.append(
                    ReadyOperation(Operation(OperationKind.COMMIT, key, decision=step.decision), True, step.opened)
                )
        return ready


class BeginsBeforeTheLastStepIsOver(StepReplica):
    """Computes a trainer's next step, of which it may hear before it has applied the one before."""

    def ready(self) -> list[ReadyOperation]:
        steps = [step for step in self.open.values() if step.decision is None]
        return [*super().ready(), *(each for step in steps if not step.begun for each in step.ready())]


class PromisesNothing(StepReplica):
    """Answers "not committed", and takes the trainer's Commit afterwards."""

    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[SendStepMessage]:
        if isinstance(message, AskOutcome):
            step = self.open.get(message.key)
            if step is not None and step.prepared and step.decision is None:
                return [SendStepMessage(sender, TellOutcome(message.key, Outcome.NOT_COMMITTED))]
        return super().receive(sender, message, now_s)


class AbortsWithoutWaitingForTheSilent(StepReplica):
    def lost(self, peer: PeerId, now_s: float) -> list[SendStepMessage]:
        sends = super().lost(peer, now_s)
        for step in list(self.open.values()):
            if step.in_doubt and peer in step.settle().unanswered():
                denial = TellOutcome(step.request.key, Outcome.NOT_COMMITTED, forgotten=step.settle().forgotten)
                sends += self.receive(peer, denial, now_s)
        return sends


class AbortsAPreparedStepAlone(StepReplica):
    def lost(self, peer: PeerId, now_s: float) -> list[SendStepMessage]:
        for step in list(self.open.values()):
            if step.trainer == peer and step.decision is None:
                step.prepared = False
        return super().lost(peer, now_s)


class ForgetsWhatItHasCommitted(StepReplica):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

        class Forgetful(AttemptLedger):
            def committed(self, key: StepKey) -> None:
                return None

        self._ledger = Forgetful()


class DeniesWhatItsEarlierGenerationKnew(StepReplica):
    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[SendStepMessage]:
        if isinstance(message, TellOutcome) and message.outcome == Outcome.FORGOTTEN:
            message = TellOutcome(message.key, Outcome.ABORTED)
        return super().receive(sender, message, now_s)


class IgnoresFences(StepReplica):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._ledger.is_fenced = lambda key: False  # type: ignore[method-assign]


class OpensStepsOfAnotherRound(StepReplica):
    def _refusal(self, sender: PeerId, request: Open) -> str | None:
        reason = super()._refusal(sender, request)
        return None if reason in ("closed", "behind") and self.round else reason


class ReplaysAfterItsFirstCommit(StepTrainer):
    def lost(self, peer: PeerId, now_s: float) -> list[TrainerEffect]:
        if self._phase == StepPhase.COMMITTING and self._plan is not None and peer in self._path:
            self._avoidance.lose(peer, now_s + 0.5)
            return self._again(self._plan, now_s)
        return super().lost(peer, now_s)


class NoticesALossByItsTimeout(StepTrainer):
    """Remembers that a replica is lost, and leaves it to the step's timeout to begin anew."""

    def lost(self, peer: PeerId, now_s: float) -> list[TrainerEffect]:
        if self._phase in (StepPhase.OPENING, StepPhase.RUNNING) and peer in self._path:
            self._avoidance.lose(peer, now_s + 0.5)
            return []
        return super().lost(peer, now_s)


class UsesOneAttemptForAll(StepTrainer):
    def _open(self, plan: object, now_s: float) -> list[TrainerEffect]:
        if self._key.attempt >= 0:
            self._key = self._key._replace(attempt=self._key.attempt - 1)
        return super()._open(plan, now_s)  # type: ignore[arg-type]


class WeighsBySamples(StepTrainer):
    def start(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        weights = tuple((1,) * len(targets) for targets in plan.microbatch_targets)
        return super().start(replace(plan, microbatch_targets=weights), now_s)


class TakesMicrobatchesOfAnySize(StepReplica):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "max_microbatch_samples": None})  # type: ignore[arg-type]


class HoldsWhateverComes(StepReplica):
    """Says how many microbatches of a step it holds, and takes more."""

    def _on_payload(self, sender: PeerId, message: Payload) -> list[SendStepMessage]:
        said, self.room = self.room, None
        sends = super()._on_payload(sender, message)
        self.room = said
        return sends


class HeedsNoRoom(StepTrainer):
    """Has as many microbatches in flight as it likes, whatever replicas say."""

    def start(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        self._flight = FlightWindow(inf)
        return super().start(plan, now_s)


class CutsByNoCap(StepTrainer):
    def start(self, plan: StepPlan, now_s: float) -> list[TrainerEffect]:
        replicas = tuple(tuple(ReplicaRef(replica.hop) for replica in stage) for stage in plan.replicas)
        return super().start(replace(plan, replicas=replicas), now_s)

    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[TrainerEffect]:
        if isinstance(message, Refused):
            message = Refused(message.key, message.reason)
        return super().receive(sender, message, now_s)


class FeedsWholeMicrobatches(StepTrainer):
    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[TrainerEffect]:
        effects = super().receive(sender, message, now_s)
        return [replace(e, part=replace(e.part, start=0)) if isinstance(e, FeedMicrobatch) else e for e in effects]


class AddsRepeatedBackwards(StepReplica):
    """Computes a backward that arrives again once more, instead of answering with what it has."""

    def receive(self, sender: PeerId, message: StepMessage, now_s: float) -> list[SendStepMessage]:
        if isinstance(message, Backward):
            step = self.open.get(message.key)
            if step is not None and not step.prepared and message.microbatch < step.passes[0].backwards:
                step.passes[0].backwards = message.microbatch
        return super().receive(sender, message, now_s)


class WritesBuffersAtOnce(ReplicaHost):
    """A forward changes the live buffers, so that an aborted step has changed them too."""

    def _forward(self, key: StepKey, received: Chain) -> Chain:
        if key not in self.buffers:
            self.buffers.append(key)
        return super()._forward(key, received)

    def _apply(self, key: StepKey, work: Work) -> None:
        self.buffers.remove(key)
        super()._apply(key, work)


def _make(
    first_seed: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    *,
    is_wrapped: bool | None = None,
    **classes: type,
) -> tuple[Make, int]:
    return lambda seed: World(seed, schedule=schedule, is_wrapped=is_wrapped, **classes), first_seed  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Make, int]] = {
    mutant.__name__: _make(first_seed, replica_class=mutant)
    for mutant, first_seed in (
        (CommitsWithoutAllMicrobatches, 0),
        (CommitsWhileAnotherStepHasBegun, 0),
        (BeginsBeforeTheLastStepIsOver, 0),
        (PromisesNothing, 100),
        (AbortsWithoutWaitingForTheSilent, 194),
        (AbortsAPreparedStepAlone, 4),
        (ForgetsWhatItHasCommitted, 4),
        (IgnoresFences, 26),
        (OpensStepsOfAnotherRound, 11),
        (TakesMicrobatchesOfAnySize, 1),
        (HoldsWhateverComes, 22),
        (AddsRepeatedBackwards, 0),
    )
}
MUTANTS["CommitsWhenItsHeadIsDone"] = _make(0, is_wrapped=True, replica_class=CommitsWhenItsHeadIsDone)
MUTANTS |= {
    mutant.__name__: _make(first_seed, Schedule.ZERO_BUBBLE, replica_class=mutant)
    for mutant, first_seed in (
        (CommitsWithoutAllWeightGradients, 0),
        (AddsWeightGradientsTwice, 0),
        (DeniesWhatItsEarlierGenerationKnew, 1),
    )
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, trainer_class=mutant)
    for mutant, first_seed in (
        (ReplaysAfterItsFirstCommit, 2),
        (NoticesALossByItsTimeout, 6),
        (UsesOneAttemptForAll, 6),
        (CutsByNoCap, 2),
        (HeedsNoRoom, 0),
        (FeedsWholeMicrobatches, 0),
        (WeighsBySamples, 0),
    )
}
MUTANTS["WritesBuffersAtOnce"] = _make(0, host_class=WritesBuffersAtOnce)
