"""What the machines ask of each other, left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tests.simulation.step.hosts import Join
from tests.simulation.swarm.hosts import Server, Steps
from tests.simulation.swarm.world import World

from shoal.ids import PeerId, StepKey
from shoal.swarm.lease import LeaseTable, _Lease  # pyright: ignore[reportPrivateUsage]
from shoal.swarm.takeover import Settled, TakeoverMachine


class _JoinsWithWhatItHas(Steps):
    def close(self) -> None:
        self._do(self.machine.close())
        self.joined = Join(self.machine.round, self.life, (), ())
        self.server.steps_closed()


class JoinsTooEarly(Server):
    """Joins the round while steps are still open."""

    steps_class = _JoinsWithWhatItHas


class _StaysInItsRound(Steps):
    def begin(self, round: int) -> None:
        if round <= 1:
            super().begin(round)


class TrainsOnInTheOldRound(Server):
    """Swaps to a record, and goes on with the steps of the round before."""

    steps_class = _StaysInItsRound


class MovesLeasesAtOnce(LeaseTable):
    """Frees what a dead trainer had without asking what was committed."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return True


class _HearsOfNobodyElse(TakeoverMachine):
    def settled(self, everyone: Collection[PeerId], steady: Collection[PeerId]) -> Settled:
        return super().settled(self._answers, steady)


class CountsTheLostAsSettled(LeaseTable):
    """Frees what no replica that can be reached has committed, as if one that is cut off had committed nothing."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return not (held.done or held.left) and has_all_notes


class FreesWhatIsLeftToTheRecord(LeaseTable):
    """Frees what its trainer has left to the record, when that one dies later."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        return held.left or super()._is_untrained(held, settled, has_all_notes)


class TakesAnyReplicaForAWitness(LeaseTable):
    """Believes a replica that is not on the path of the attempt."""

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        paths = {key: tuple(settled.witnesses) for key in held.attempts}
        return super()._is_untrained(replace(held, attempts=paths), settled, has_all_notes)


class TakesNewLivesForWitnesses(TakeoverMachine):
    """Believes a replica that was started again since, and has forgotten what its earlier life had committed."""

    def settled(self, everyone: Collection[PeerId], steady: Collection[PeerId]) -> Settled:
        oldest = StepKey(self._slot, self._lowest - 1, -1, -1)
        return replace(super().settled(everyone, steady), witnesses=dict.fromkeys(self._answers, oldest))


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    "JoinsTooEarly": (lambda seed: World(seed, host_class=JoinsTooEarly), 0),
    "TrainsOnInTheOldRound": (lambda seed: World(seed, host_class=TrainsOnInTheOldRound), 0),
    "MovesLeasesAtOnce": (lambda seed: World(seed, table_class=MovesLeasesAtOnce), 72),
    "CountsTheLostAsSettled": (
        lambda seed: World(seed, table_class=CountsTheLostAsSettled, takeover_class=_HearsOfNobodyElse),
        0,
    ),
    "FreesWhatIsLeftToTheRecord": (lambda seed: World(seed, table_class=FreesWhatIsLeftToTheRecord), 0),
    "TakesAnyReplicaForAWitness": (lambda seed: World(seed, table_class=TakesAnyReplicaForAWitness), 0),
    "TakesNewLivesForWitnesses": (lambda seed: World(seed, takeover_class=TakesNewLivesForWitnesses), 0),
}
