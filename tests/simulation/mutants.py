"""All mutants: machines, and models of what computes, with one rule left out each.

Each has the first seed that notices, so that the gate (`test_mutants.py`) is fast: it looks at `GATE_SEEDS` seeds from
there on. When worlds change, it is another one: the gate looks for it from 0 on then, which takes longer, and warns.
`python -m tests.simulation --mutants` finds the first seeds anew.

Noticed is what breaks a promise (`Broken`), and nothing else. Where a mutant sends what a machine that ships refuses as
against the protocol, production closes the connection: that seed shows nothing. A mutant that ends with any other error
is no machine with a rule left out, but one that has lost touch with the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.simulation.catalogue import World
from tests.simulation.clients import mutants as clients
from tests.simulation.homes import mutants as homes
from tests.simulation.incidents import mutants as incidents
from tests.simulation.lease import mutants as lease
from tests.simulation.membership import mutants as membership
from tests.simulation.placing import mutants as placing
from tests.simulation.round import mirror_mutants as mirrors
from tests.simulation.round import moving_mutants as moves
from tests.simulation.round import mutants as round
from tests.simulation.round import resuming_mutants as resumed
from tests.simulation.run import mutants as run
from tests.simulation.safety import Broken
from tests.simulation.split import mutants as split
from tests.simulation.state import mutants as state
from tests.simulation.step import mutants as step
from tests.simulation.swarm import mutants as swarm
from tests.simulation.swarm import slot_mutants as slots
from tests.simulation.swarm import snapshot_mutants as snapshots

from shoal.errors import RemoteProtocolError

GATE_SEEDS = 40


@dataclass(frozen=True)
class Mutant:
    """A broken machine in its world, and the first seed that notices."""

    make: Callable[[int], World]
    first_seed: int

    def noticed(self, seeds: Iterable[int]) -> int | None:
        """Return the first of these seeds in which a promise is broken."""
        return next(self.noticing(seeds), None)

    def noticing(self, seeds: Iterable[int]) -> Iterator[int]:
        """Yield those of these seeds in which a promise is broken; errors other than the protocol's are raised."""
        for seed in seeds:
            try:
                self.make(seed).run()
            except Broken:
                yield seed
            except RemoteProtocolError:
                continue


MODULES = (
    step,
    swarm,
    slots,
    snapshots,
    round,
    mirrors,
    resumed,
    run,
    split,
    moves,
    lease,
    membership,
    placing,
    clients,
    homes,
    incidents,
    state,
)
MUTANTS: dict[str, Mutant] = {
    name: Mutant(make, first_seed) for module in MODULES for name, (make, first_seed) in module.MUTANTS.items()
}
