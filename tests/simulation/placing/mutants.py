"""The rules of placing, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tests.simulation.placing.world import Server, World

from shoal.ids import PeerId, StageIndex
from shoal.swarm.reassignment import Move, next_move
from shoal.swarm.view import SwarmView


def moves_nobody(view: SwarmView, num_stages: int, holders: Collection[PeerId]) -> Move | None:
    """Leaves gaps as they are."""
    return None


def moves_without_gain(view: SwarmView, num_stages: int, holders: Collection[PeerId]) -> Move | None:
    """Moves a server whatever that brings."""
    move = next_move(view, num_stages, holders)
    crowded = [stage for stage in range(num_stages) if len(view.by_stage(stage)) > 1]
    if move is not None or not crowded:
        return move
    free = [replica for replica in view.by_stage(crowded[0]) if not replica.pinned]
    return Move(free[0].peer, crowded[0], (crowded[0] + 1) % num_stages, False) if free else None


def takes_the_last_one(view: SwarmView, num_stages: int, holders: Collection[PeerId]) -> Move | None:
    """Empties a stage to fill another one."""
    empty = view.missing_stages(num_stages)
    lonely = [view.by_stage(stage)[0] for stage in range(num_stages) if len(view.by_stage(stage)) == 1]
    free = [replica for replica in lonely if not replica.pinned]
    return Move(free[0].peer, free[0].stage, empty[0], True) if empty and free else None


def moves_the_pinned(view: SwarmView, num_stages: int, holders: Collection[PeerId]) -> Move | None:
    """Does not ask whether a server's stage was given by its user."""
    freed = tuple(
        type(replica)(replica.hop, replica.join_unix_s, stage=StageIndex(replica.stage), capacity=replica.capacity)
        for replica in view.replicas
    )
    return next_move(SwarmView(freed, view.candidates), num_stages, holders)


class WaitsForItself(Server):
    """Chooses only when nobody is a candidate besides it."""

    def choose(self) -> None:
        others = [record for peer, record in self.seen.items() if peer != self.peer and not hasattr(record, "stage")]
        if others:
            self.world.network.on_host(self.peer, 0.5, self.choose)
            return
        super().choose()


Make = Callable[[int], World]

MUTANTS: dict[str, tuple[Make, int]] = {
    "MovesNobody": (lambda seed: World(seed, decide=moves_nobody), 23),
    "MovesWithoutGain": (lambda seed: World(seed, decide=moves_without_gain), 0),
    "TakesTheLastOne": (lambda seed: World(seed, decide=takes_the_last_one), 1),
    "MovesThePinned": (lambda seed: World(seed, decide=moves_the_pinned), 10),
    "WaitsForItself": (lambda seed: World(seed, server_class=WaitsForItself), 0),
}
