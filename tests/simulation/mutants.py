"""All mutants: machines, and models of what computes, with one rule left out each.

Each has the first seed that notices, so that the gate (`test_mutants.py`) is fast: it looks at `GATE_SEEDS` seeds from
there on. When worlds change, `python -m tests.simulation --mutants` finds the first seeds anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.simulation.catalogue import FAILURES, World
from tests.simulation.lease import mutants as lease
from tests.simulation.membership import mutants as membership
from tests.simulation.placing import mutants as placing
from tests.simulation.round import moving_mutants as moves
from tests.simulation.round import mutants as round
from tests.simulation.split import mutants as split
from tests.simulation.state import mutants as state
from tests.simulation.step import mutants as step
from tests.simulation.swarm import mutants as swarm
from tests.simulation.swarm import snapshot_mutants as snapshots

GATE_SEEDS = 40


@dataclass(frozen=True)
class Mutant:
    """A broken machine in its world, and the first seed that notices."""

    make: Callable[[int], World]
    first_seed: int

    def noticed(self, seeds: Iterable[int]) -> int | None:
        """Return the first of these seeds that notices: by what must hold, or because the machine itself refuses."""
        for seed in seeds:
            try:
                self.make(seed).run()
            except FAILURES:
                return seed
        return None


FAMILIES = (
    step.MUTANTS,
    swarm.MUTANTS,
    snapshots.MUTANTS,
    round.MUTANTS,
    split.MUTANTS,
    moves.MUTANTS,
    lease.MUTANTS,
    membership.MUTANTS,
    placing.MUTANTS,
    state.MUTANTS,
)
MUTANTS: dict[str, Mutant] = {
    name: Mutant(make, first_seed) for family in FAMILIES for name, (make, first_seed) in family.items()
}
