"""The rules of a client's run, each left out on purpose; `test_mutants.py` runs them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.run.world import World

from shoal.errors import ControlError
from shoal.ids import Ballot
from shoal.swarm.round_boundary import RoundBoundary
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.routing import Pipeline
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import (
    BeginRound,
    EndTraining,
    GiveInner,
    PlaceServers,
    RunEffects,
    RunFacts,
    RunPhase,
    Stand,
)


class TakesBallotsAgain(RunClient):
    """Takes another ballot while it waits for what the servers hold."""

    def _lead(self, facts: RunFacts, now_s: float) -> RunEffects:
        return [Stand()] if facts.ready is None and self._has_passed(now_s, 0.5) else super()._lead(facts, now_s)


class GathersNobody(RunClient):
    """Leads whoever is there."""

    def _gather(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._enter(RunPhase.LEAD)


class GathersForEver(RunClient):
    """Waits for the servers that were started, however long."""

    def _gather(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._since_s = now_s
        return super()._gather(facts, now_s)


class LosesPatience(RunClient):
    """Waits for servers no longer than others do, though its user wants it to."""

    def __init__(self, rules: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(replace(rules, patient=False), *arguments, **more)


class GivesUpAtOnce(RunClient):
    """Does not give servers the time that they have."""

    def __init__(self, rules: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(replace(rules, servers_timeout_s=rules.servers_timeout_s / 2), *arguments, **more)


class DoesNotSettle(RunClient):
    """Leads as soon as there is one pipeline, where nobody knows how many there will be."""

    def _settle(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._enter(RunPhase.LEAD)


class EndsForWantOfServers(RunClient):
    """Ends a run that has begun, since a stage has had nobody for long."""

    def _lead(self, facts: RunFacts, now_s: float) -> RunEffects:
        had_led, self._has_led = self._has_led, False
        effects = super()._lead(facts, now_s)
        self._has_led = had_led or self._has_led
        return effects


class ResumesWithFew(RunClient):
    """Goes on from a checkpoint before all servers that are there have taken it."""

    def _catch_up(self, facts: RunFacts, now_s: float) -> RunEffects:
        base, self.base = self.base, ""
        effects = super()._catch_up(facts, now_s)
        self.base = base
        return effects


class PlacesAlways(RunClient):
    """Sends servers elsewhere before it goes on with a round that it was in."""

    def _catch_up(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._enter(RunPhase.PLACE, PlaceServers())


class PlacesInPassing(RunClient):
    """Begins while servers are on their way."""

    def _place(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._go_on(facts)


class GoesOnAnywhere(RunClient):
    """Takes what stands for its own, whoever has made it."""

    def _is_where_it_was(self, facts: RunFacts, ready: RoundReady) -> bool:
        return True


class AsksForRoundsAlone(RunClient):
    """Takes a record for its own that is the one after its own, whoever has made it."""

    def _is_where_it_was(self, facts: RunFacts, ready: RoundReady) -> bool:
        left = self._left
        return super()._is_where_it_was(facts, ready) or (left is not None and ready.tip.round == left.round)


class TrainsWhatItFinds(RunClient):
    """Trains on the record of others before the round that they have begun is ended."""

    def _inherit(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._next_round() if self._is_carried_out else []


class EndsRoundsThatAreNone(RunClient):
    """Ends the round that it finds also after the last one."""

    def _inherit(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._round = self._led.tip.round + 1
        return self._enter(RunPhase.HAND_OVER) if self._is_carried_out else []


class FormsNothing(RunClient):
    """Begins a round without a pipeline."""

    def _form(self, facts: RunFacts, now_s: float) -> RunEffects:
        super()._form(facts, now_s)
        return self._enter(RunPhase.STAFF)


class FormsOnce(RunClient):
    """Goes on with the pipelines of the round before, whoever is lost."""

    def _form(self, facts: RunFacts, now_s: float) -> RunEffects:
        if self._before and not facts.is_unfed:
            self.pipelines = self._before
            return self._enter(RunPhase.STAFF)
        return super()._form(facts, now_s)


class KeepsHoles(RunClient):
    """Lets slots keep their numbers, so that there are holes between them."""

    def _form(self, facts: RunFacts, now_s: float) -> RunEffects:
        effects = super()._form(facts, now_s)
        gone = len(self._before) > len(self.pipelines) > 0
        if gone:
            self.pipelines = tuple(Pipeline(pipeline.slot + 1, pipeline.path) for pipeline in self.pipelines)
        return effects


class StartsNobody(RunClient):
    """Waits for trainers that nobody has started."""

    def _begin_staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        super()._begin_staff(facts, now_s)
        return []


class WaitsForThoseThatHang(RunClient):
    """Waits for a trainer's hello, however long."""

    def _staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._since_s = now_s
        return super()._staff(facts, now_s)


class NeedsEveryTrainer(RunClient):
    """Ends the run if one of its trainers does not come."""

    def _staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        awaited = [slot for slot in self._awaited if slot in self._slots.silent(self._awaited)]
        effects = super()._staff(facts, now_s)
        is_left_behind = self.phase is RunPhase.GIVE and awaited
        return self._fail(ControlError(f"trainers {awaited} do not come")) if is_left_behind else effects


class NeedsThoseThatItHad(RunClient):
    """Ends the run if those do not come that an earlier start of it has left, instead of starting others."""

    def _begin_staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        effects = super()._begin_staff(facts, now_s)
        self._is_all_new = True
        return effects


class IsInAHurry(RunClient):
    """Takes a round up before the trainers that run have said hello again."""

    def _staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        return super()._staff(facts, now_s) if self._left is None else self._enter(RunPhase.TRAIN)


class GivesNothing(RunClient):
    """Begins before replicas have what their inner optimizers knew."""

    def _staff(self, facts: RunFacts, now_s: float) -> RunEffects:
        effects = super()._staff(facts, now_s)
        if self.phase is RunPhase.GIVE:
            self._is_carried_out = True
        return [effect for effect in effects if not isinstance(effect, GiveInner)]


class ForgetsItsRound(RunClient):
    """Begins the round anew that an earlier start of it was in."""

    def _begin_train(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._left = None
        return super()._begin_train(facts, now_s)


class NamesTheRecordBefore(RunClient):
    """Has its trainers train on top of the record before the one that stands."""

    def _begin_train(self, facts: RunFacts, now_s: float) -> RunEffects:
        base = self.base
        (begin,) = super()._begin_train(facts, now_s)
        return [replace(begin, base=base)] if isinstance(begin, BeginRound) and base else [begin]


class LetsThemTrain(RunClient):
    """Ends a round without a word to those that replace its trainers."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        return [effect for effect in super()._train(facts, now_s) if not isinstance(effect, EndTraining)]


class _InAnyCase(RoundBoundary):
    """Is over also in a pause."""

    def is_over(self, now_s: float, *, all_done: bool, is_stuck: bool) -> bool:
        return all_done or super().is_over(now_s, all_done=all_done, is_stuck=is_stuck)


class EndsPausedRounds(RunClient):
    """Ends a round in a pause."""

    def _begin_train(self, facts: RunFacts, now_s: float) -> RunEffects:
        effects = super()._begin_train(facts, now_s)
        self._boundary.__class__ = _InAnyCase
        return effects


class WaitsForTheFirst(RunClient):
    """Ends a round when one of its trainers is done."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        pipelines = self.pipelines
        self.pipelines = tuple(p for p in pipelines if self._slots.is_done(p.slot)) or pipelines
        effects = super()._train(facts, now_s)
        self.pipelines = pipelines
        return effects


class EndsStuckRounds(RunClient):
    """Ends a round when its time is over, also while a stage has nobody."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        if self._boundary.left_s(now_s) <= 0 and not self._time.is_paused:
            return self._enter(RunPhase.HAND_OVER, EndTraining())
        return super()._train(facts, now_s)


class EndsUnfedRounds(RunClient):
    """Ends a round when its time is over, also while nobody hands out samples."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        if facts.is_unfed and self._boundary.left_s(now_s) <= 0 and not self._time.is_paused:
            return self._enter(RunPhase.HAND_OVER, EndTraining())
        return super()._train(facts, now_s)


class EndsRefusedRounds(RunClient):
    """Ends a round when its time is over, also while servers refuse every step."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        if facts.is_refused and self._boundary.left_s(now_s) <= 0 and not self._time.is_paused:
            return self._enter(RunPhase.HAND_OVER, EndTraining())
        return super()._train(facts, now_s)


class KnowsNoDeadline(RunClient):
    """Waits for trainers, however long."""

    def _begin_train(self, facts: RunFacts, now_s: float) -> RunEffects:
        effects = super()._begin_train(facts, now_s)
        self._boundary = RoundBoundary(self._time, math.inf, now_s)
        return effects


class CountsTheWaitForItsDisk(RunClient):
    """Has trainers do their steps in what a full disk has left them of the time."""

    def begun(self, now_s: float) -> None:
        """Nothing has happened."""


class ClosesOverAHandOver(RunClient):
    """Makes a record while the state of the one before is fetched from a server that leaves."""

    def _hand_over(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._enter(RunPhase.AVERAGE)


class WaitsForWhoeverLeaves(RunClient):
    """Waits until a server has ended that may leave, however long."""

    def _hand_over(self, facts: RunFacts, now_s: float) -> RunEffects:
        return [] if facts.is_handing_over or facts.is_letting_go else self._enter(RunPhase.AVERAGE)


class EvaluatesOnce(RunClient):
    """Gives the last evaluation up when trainers were lost in it."""

    def _next_round(self) -> RunEffects:
        effects = super()._next_round()
        self._evaluations_left = 1
        return effects


class EvaluatesForEver(RunClient):
    """Evaluates until it knows the loss."""

    def _train(self, facts: RunFacts, now_s: float) -> RunEffects:
        self._evaluations_left = 2
        return super()._train(facts, now_s)


class DoesNotEvaluate(RunClient):
    """Ends with the last record."""

    def _record(self, facts: RunFacts, now_s: float) -> RunEffects:
        is_last = self._led.tip.round == self._rules.num_rounds
        return self._enter(RunPhase.OVER) if is_last and self._is_carried_out else super()._record(facts, now_s)


class LeavesMirrorsBehind(RunClient):
    """Ends before mirrors have the last record."""

    def _mirror(self, facts: RunFacts, now_s: float) -> RunEffects:
        return self._enter(RunPhase.OVER)


class WaitsForMirrors(RunClient):
    """Waits for mirrors that get no further."""

    def _mirror(self, facts: RunFacts, now_s: float) -> RunEffects:
        return [] if facts.unmirrored else self._enter(RunPhase.OVER)


class IsDeafToOthers(RunClient):
    """Goes on in its round when others were met."""

    def overtaken(self) -> None:
        """Nothing has happened."""


class TakesNoTurn(RunClient):
    """Takes the run, whoever comes before it."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **{**more, "turn": None})


class IsDeafToTheEnd(RunClient):
    """Waits on when the client before it has ended the run."""

    def ended(self, reason: str, *, well: bool) -> None:
        """Nothing has happened."""


class GoesOnDeposed(RunClient):
    """Does not care who coordinates."""

    def deposed(self, highest: Ballot) -> None:
        """Nothing has happened."""


def _make(first_seed: int, run_class: type[RunClient]) -> tuple[Callable[[int], World], int]:
    return lambda seed: World(seed, run_class), first_seed


_FIRST_SEEDS = {
    "LosesPatience": 172,
    "WaitsForWhoeverLeaves": 155,
    "IsDeafToOthers": 56,
    "FormsNothing": 303,
    "NeedsThoseThatItHad": 188,
    "EndsPausedRounds": 367,
    "EndsUnfedRounds": 72,
    "ClosesOverAHandOver": 66,
}
"""Of those that are noticed later than by the gate's seeds from 0 on."""

MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    each.__name__: _make(_FIRST_SEEDS.get(each.__name__, 0), each)
    for each in (
        TakesBallotsAgain,
        GathersNobody,
        GathersForEver,
        LosesPatience,
        GivesUpAtOnce,
        DoesNotSettle,
        EndsForWantOfServers,
        ResumesWithFew,
        PlacesAlways,
        PlacesInPassing,
        GoesOnAnywhere,
        AsksForRoundsAlone,
        TrainsWhatItFinds,
        EndsRoundsThatAreNone,
        FormsNothing,
        FormsOnce,
        KeepsHoles,
        StartsNobody,
        WaitsForThoseThatHang,
        NeedsEveryTrainer,
        NeedsThoseThatItHad,
        IsInAHurry,
        GivesNothing,
        ForgetsItsRound,
        NamesTheRecordBefore,
        LetsThemTrain,
        EndsPausedRounds,
        WaitsForTheFirst,
        EndsStuckRounds,
        EndsUnfedRounds,
        EndsRefusedRounds,
        KnowsNoDeadline,
        CountsTheWaitForItsDisk,
        ClosesOverAHandOver,
        WaitsForWhoeverLeaves,
        EvaluatesOnce,
        EvaluatesForEver,
        DoesNotEvaluate,
        LeavesMirrorsBehind,
        WaitsForMirrors,
        IsDeafToOthers,
        TakesNoTurn,
        IsDeafToTheEnd,
        GoesOnDeposed,
    )
}
