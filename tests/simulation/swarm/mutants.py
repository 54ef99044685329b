"""What the machines ask of each other, left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.step.hosts import Join
from tests.simulation.swarm.hosts import Server, Steps
from tests.simulation.swarm.world import World

from shoal.ids import StepKey
from shoal.swarm.lease import LeaseTable


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

    def release_trainer(self, trainer: int, incarnation: int, committed: tuple[StepKey, ...]) -> tuple[int, ...]:
        return super().release_trainer(trainer, incarnation, ())


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    "JoinsTooEarly": (lambda seed: World(seed, host_class=JoinsTooEarly), 0),
    "TrainsOnInTheOldRound": (lambda seed: World(seed, host_class=TrainsOnInTheOldRound), 0),
    "MovesLeasesAtOnce": (lambda seed: World(seed, table_class=MovesLeasesAtOnce), 72),
}
