"""Who takes the place of a lost trainer: the rules of that, each left out, with the first seed that notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.swarm.world import World

from shoal.ids import PeerId
from shoal.swarm.takeover import TakeoverMachine
from shoal.swarm.trainer_slots import SlotEffects, TrainerSlots


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


class FencesTheNextOne(TrainerSlots):
    """Has the new trainer refused with those before it."""

    def _replace(self, training: Any, slot: int, generation: int, now_s: float, *, is_launched: bool) -> None:
        super()._replace(training, slot, generation, now_s, is_launched=is_launched)
        training.replacements[slot].fencing = TakeoverMachine(slot, generation + 1, training.round, now_s)


class KeepsTheLost(TrainerSlots):
    """Takes a trainer for present whose connection has ended."""

    def lost(self, peer: PeerId, now_s: float) -> SlotEffects:
        return [] if self.slot_of(peer) is not None else super().lost(peer, now_s)


class StartsAnotherMeanwhile(TrainerSlots):
    """Starts one more trainer whenever it looks, as long as the slot has none."""

    def _look(self, training: Any, now_s: float) -> SlotEffects:
        training.replacements.clear()
        return super()._look(training, now_s)


def _make(slots_class: type[TrainerSlots]) -> Callable[[int], World]:
    return lambda seed: World(seed, slots_class=slots_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (GoesOnFromTheFirstStep, 2),
        (SettlesNothing, 2),
        (FencesTheNextOne, 2),
        (KeepsTheLost, 2),
        (StartsAnotherMeanwhile, 4),
    )
}
