"""All worlds, by name. A world is made from a seed and has `run()`, which raises `Broken`; that is all it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tests.simulation.clients.world import World as ClientsWorld
from tests.simulation.homes.world import World as HomesWorld
from tests.simulation.incidents.world import World as IncidentsWorld
from tests.simulation.kernel import Kernel
from tests.simulation.lease.world import World as LeaseWorld
from tests.simulation.membership.world import World as MembershipWorld
from tests.simulation.placing.world import World as PlacingWorld
from tests.simulation.round.lost_commits import LostCommitWorld as RoundWorld
from tests.simulation.round.moving import MovingWorld
from tests.simulation.run.world import World as RunWorld
from tests.simulation.split.world import SplitWorld
from tests.simulation.state.slow_world import SlowWorld
from tests.simulation.state.world import World as StateWorld
from tests.simulation.step.world import World as StepWorld
from tests.simulation.swarm.snapshots import SnapshotWorld
from tests.simulation.swarm.world import World as SwarmWorld

from shoal.errors import ShoalError

FAILURES = (AssertionError, ShoalError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""How a schedule fails: by a promise, or because a machine raises what its driver would not take."""


class World(Protocol):
    """One seeded run; its `network` is its clock, and has a trace if it is a whole network."""

    @property
    def network(self) -> Kernel: ...

    def run(self) -> object: ...


@dataclass(frozen=True)
class Entry:
    """A world of the catalogue.

    Attributes:
        make: From a seed.
        slice_seeds: How many seeds of it `make test-all` runs, in blocks of which `make test` runs one in five.
    """

    make: Callable[[int], World]
    slice_seeds: int


WORLDS: dict[str, Entry] = {
    "step": Entry(StepWorld, 200),
    "round": Entry(RoundWorld, 200),
    "swarm": Entry(SwarmWorld, 50),
    "split": Entry(SplitWorld, 150),
    "snapshots": Entry(SnapshotWorld, 50),
    "moves": Entry(MovingWorld, 100),
    "lease": Entry(LeaseWorld, 800),
    "membership": Entry(MembershipWorld, 300),
    "placing": Entry(PlacingWorld, 300),
    "clients": Entry(ClientsWorld, 300),
    "homes": Entry(HomesWorld, 200),
    "run": Entry(RunWorld, 500),
    "incidents": Entry(IncidentsWorld, 300),
    "state": Entry(StateWorld, 1000),
    "slow-state": Entry(SlowWorld, 100),
}
