"""Who takes the place of a lost trainer: the rules of that, each left out, with the first seed that notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from tests.simulation.swarm.world import World

from shoal.ids import PeerId
from shoal.swarm.takeover import TakeoverMachine
from shoal.swarm.trainer_slots import SlotEffects, TrainerSlots
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import TrainerHello


class GoesOnFromTheFirstStep(TrainerSlots):
    """Has the next trainer do the round from its beginning, whatever the one before has done."""

    def _greet(self, training: Any, slot: int, replacement: Any, now_s: float) -> SlotEffects:
        replacement.next_step = training.steps.first
        return super()._greet(training, slot, replacement, now_s)


class SettlesNothing(TrainerSlots):
    """Starts the next trainer, and asks nobody what the one before has done."""

    def _replace(self, training: Any, slot: int, generation: int, now_s: float, *, is_launched: bool) -> None:
        super()._replace(training, slot, generation, now_s, is_launched=is_launched)
        training.replacements[slot].fencing = None


class AsksNobody(TrainerSlots):
    """Takes for settled what no replica has answered yet."""

    def _fence(self, training: Any, slot: int, replacement: Any, now_s: float) -> SlotEffects:
        live, self._live = self._live, ()
        effects = super()._fence(training, slot, replacement, now_s)
        self._live = live
        return effects


class FencesTheNextOne(TrainerSlots):
    """Has the new trainer refused with those before it."""

    def _replace(self, training: Any, slot: int, generation: int, now_s: float, *, is_launched: bool) -> None:
        super()._replace(training, slot, generation, now_s, is_launched=is_launched)
        training.replacements[slot].fencing = TakeoverMachine(slot, generation + 1, training.round, now_s)


class TrustsWhoWasLost(TrainerSlots):
    """Takes a replica whose connection has ended since the round began for the one that was there then."""

    def lost(self, peer: PeerId, now_s: float) -> SlotEffects:
        training = self._training
        steady = set[PeerId]() if training is None else set(training.steady)
        if training is not None:
            training.steady = _Kept(steady)
        return super().lost(peer, now_s)


class _Kept(set[PeerId]):
    def discard(self, peer: PeerId) -> None:
        """It stays."""


class KeepsTheLost(TrainerSlots):
    """Takes a trainer for present whose connection has ended."""

    def lost(self, peer: PeerId, now_s: float) -> SlotEffects:
        return [] if self.slot_of(peer) is not None else super().lost(peer, now_s)


class ForgetsWhoWasNotTold(TrainerSlots):
    """Leaves trainers that an earlier start of the client has not told of the round without steps."""

    def begin_round(
        self,
        round: int,
        slots: frozenset[int],
        steps: StepRange,
        named: Collection[PeerId] | None,
        steady: Collection[PeerId],
        now_s: float,
    ) -> SlotEffects:
        return super().begin_round(round, slots, steps, () if named is None else named, steady, now_s)


class StartsAnotherMeanwhile(TrainerSlots):
    """Starts one more trainer whenever it looks, as long as the slot has none."""

    def _look(self, training: Any, now_s: float) -> SlotEffects:
        training.replacements.clear()
        return super()._look(training, now_s)


class LooksNoMore(TrainerSlots):
    """Replaces no trainer that is lost while the one before is settled."""

    def _greet(self, training: Any, slot: int, replacement: Any, now_s: float) -> SlotEffects:
        if not self.silent([slot]) and self._slots[slot].hop is None:
            training.slots -= {slot}
        return super()._greet(training, slot, replacement, now_s)


class ReplacesThemForEver(TrainerSlots):
    """Replaces the trainers of a slot in a round as often as they are lost."""

    def _look(self, training: Any, now_s: float) -> SlotEffects:
        training.starts.clear()
        return super()._look(training, now_s)


class IsDoneForGood(TrainerSlots):
    """Expects nothing in this round of a slot that was done in one before."""

    def nothing_done(self) -> None:
        """Who was done stays so."""


class WaitsForEver(TrainerSlots):
    """Waits for the hello of a trainer that was started until the round ends."""

    def _await_hello(self, replacement: Any) -> None:
        super()._await_hello(replacement)
        replacement.silent_at_s = math.inf


class StaysInItsRound(TrainerSlots):
    """Goes on replacing trainers while the round is ended."""

    def end_round(self) -> None:
        pass


class BelievesEarlierOnes(TrainerSlots):
    """Takes a trainer for its slot's although a later one was started."""

    def _hello(self, peer: PeerId, hello: TrainerHello, now_s: float) -> SlotEffects:
        if hello.slot in self._slots:
            self._slots[hello.slot].generation = hello.generation
        return super()._hello(peer, hello, now_s)


def _make(slots_class: type[TrainerSlots]) -> Callable[[int], World]:
    return lambda seed: World(seed, slots_class=slots_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (GoesOnFromTheFirstStep, 1),
        (SettlesNothing, 1),
        (AsksNobody, 1),
        (FencesTheNextOne, 1),
        (TrustsWhoWasLost, 24),
        (KeepsTheLost, 0),
        (ForgetsWhoWasNotTold, 71),
        (StartsAnotherMeanwhile, 3),
        (LooksNoMore, 2),
        (ReplacesThemForEver, 2),
        (IsDoneForGood, 1),
        (WaitsForEver, 1),
        (StaysInItsRound, 0),
        (BelievesEarlierOnes, 5),
    )
}
