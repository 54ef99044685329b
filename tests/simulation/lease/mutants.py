"""The rules of leases, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tests.simulation.lease.world import World

from shoal.ids import PeerId, StepKey
from shoal.swarm.lease import Denial, Grant, Later, LeaseTable, _Lease  # pyright: ignore[reportPrivateUsage]
from shoal.swarm.round_boundary import RoundBoundary, RunTime
from shoal.swarm.sample_ranges import Batch, BatchStream, Ranges
from shoal.swarm.shared_deal import SharedDeal
from shoal.swarm.takeover import Settled, TakeoverMachine


class FencesNobody(LeaseTable):
    """Gives a lease to a trainer whose place was taken."""

    def lease(
        self, trainer: int, generation: int, round_number: int, step: int, now_s: float = 0.0
    ) -> Grant | Later | Denial:
        self._lowest_generation.clear()
        return super().lease(trainer, generation, round_number, step, now_s)


class HasEverything(LeaseTable):
    """Takes it for free whatever a trainer says to have leased."""

    def __init__(self, stream: BatchStream, *, deterministic: bool, max_samples: int | None = None) -> None:
        super().__init__(stream, deterministic=deterministic, max_samples=max_samples)
        if isinstance(self._deal, SharedDeal):
            self._deal._unused.has = lambda samples: True  # type: ignore[method-assign]


class FreesWhatIsCommitted(LeaseTable):
    """Frees all that a dead trainer had, although replicas have committed some of it."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return True


class IgnoresLostNotes(LeaseTable):
    """Frees leases without a note although an attempt may be committed of which nobody has noted the lease."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return super()._is_untrained(held, settled, True)


class AsksNoWitness(LeaseTable):
    """Frees what nobody says to have committed."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return not held.done and not held.left


class FreesWhatWasLeft(LeaseTable):
    """Frees what its trainer has left to the record, when that one dies later."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return held.left or super()._is_untrained(held, settled, has_all_notes)


class TakesNewGenerationsForOldOnes(TakeoverMachine):
    """Believes a replica that was started again since, and has forgotten what its earlier generation had committed."""

    def settled(self, everyone: Collection[PeerId], steady: Collection[PeerId]) -> Settled:
        oldest = StepKey(self._slot, self._lowest - 1, -1, -1)
        return replace(super().settled(everyone, steady), witnesses=dict.fromkeys(self._answers, oldest))


class TakesThoseThatAnswerForAll(TakeoverMachine):
    """Takes leases without a note for unused although somebody who could know of the attempt has not answered."""

    def settled(self, everyone: Collection[PeerId], steady: Collection[PeerId]) -> Settled:
        return super().settled(self._answers, steady)


class FreesWhatIsRecorded(LeaseTable):
    """Puts a whole batch back of which a part is in the record."""

    def record(self, round_number: int, samples: Ranges) -> tuple[int, ...]:
        left_of, self._recorded.left_of = self._recorded.left_of, lambda batch: batch  # type: ignore[method-assign]
        ended = super().record(round_number, samples)
        self._recorded.left_of = left_of  # type: ignore[method-assign]
        return ended


class FreesNothing(LeaseTable):
    """What was leased and is in no record stays away."""

    def _free_lease(self, number: int) -> None:
        held = self._leases.pop(number)
        if held.done or held.attempts:
            held.batch = Batch(held.batch.samples)
            return
        self._leases[number] = held
        super()._free_lease(number)


class LeasesInAPause(LeaseTable):
    """Hands out batches as if nobody had paused the run."""

    def pause(self) -> None:
        pass


class EndsRoundsInAPause(RoundBoundary):
    """Ends a round when its trainers are done or its deadline passes, whether the run is paused or not."""

    def is_over(self, now_s: float, *, all_done: bool, is_stuck: bool) -> bool:
        time, self._time = self._time, RunTime(self._time.paused_s)
        is_over = super().is_over(now_s, all_done=all_done, is_stuck=is_stuck)
        self._time = time
        return is_over


class CountsPauses(RunTime):
    """Takes the time of a pause for time in which trainers could have been done."""

    def at_s(self, now_s: float) -> float:
        return now_s


def _make(table_class: type[LeaseTable]) -> Callable[[int], World]:
    return lambda seed: World(seed, table_class)


def _taking_over(takeover_class: type[TakeoverMachine]) -> Callable[[int], World]:
    return lambda seed: World(seed, takeover_class=takeover_class)


def _ending(boundary_class: type[RoundBoundary]) -> Callable[[int], World]:
    return lambda seed: World(seed, boundary_class=boundary_class)


def _timing(time_class: type[RunTime]) -> Callable[[int], World]:
    return lambda seed: World(seed, time_class=time_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (FencesNobody, 0),
        (HasEverything, 0),
        (FreesWhatIsCommitted, 0),
        (IgnoresLostNotes, 1),
        (AsksNoWitness, 1),
        (FreesWhatWasLeft, 9),
        (FreesWhatIsRecorded, 1),
        (FreesNothing, 0),
        (LeasesInAPause, 0),
    )
}
MUTANTS |= {
    mutant.__name__: (_taking_over(mutant), first_seed)
    for mutant, first_seed in (
        (TakesNewGenerationsForOldOnes, 113),
        (TakesThoseThatAnswerForAll, 23),
    )
}
MUTANTS |= {
    "EndsRoundsInAPause": (_ending(EndsRoundsInAPause), 0),
    "CountsPauses": (_timing(CountsPauses), 0),
}
