"""The rules of placing, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tests.simulation.placing.world import Server, World

from shoal.ids import PeerId, StageIndex
from shoal.swarm.placement import StageMove, improve
from shoal.swarm.view import SwarmView
from shoal.wire.messages.base import Hop


def moves_nobody(view: SwarmView, num_stages: int, holders: Collection[PeerId], *, trains: bool) -> StageMove | None:
    """Leaves gaps as they are."""
    return None


def moves_without_gain(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Moves a server whatever that brings."""
    move = improve(view, num_stages, holders, trains=trains)
    crowded = [stage for stage in range(num_stages) if len(view.by_stage(stage)) > 1]
    if move is not None or not crowded:
        return move
    free = [replica for replica in view.by_stage(crowded[0]) if not replica.pinned]
    return StageMove(free[0].peer, crowded[0], (crowded[0] + 1) % num_stages, False) if free else None


def takes_the_last_one(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Empties a stage to fill another one."""
    empty = view.missing_stages(num_stages)
    lonely = [view.by_stage(stage)[0] for stage in range(num_stages) if len(view.by_stage(stage)) == 1]
    free = [replica for replica in lonely if not replica.pinned]
    return StageMove(free[0].peer, free[0].stage, empty[0], True) if empty and free else None


def moves_the_pinned(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Does not ask whether a server's stage was given by its user."""
    freed = tuple(
        type(replica)(replica.hop, replica.join_unix_s, stage=StageIndex(replica.stage)) for replica in view.replicas
    )
    return improve(SwarmView(freed, view.candidates), num_stages, holders, trains=trains)


def corrects_nothing(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], exempt: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Begins the first round with what each server has chosen by what it saw."""
    return None


def corrects_without_hosts(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], exempt: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Does not ask which machine a server runs on."""
    anywhere = tuple(replace(replica, hop=Hop(replica.peer, ())) for replica in view.replicas)
    return improve(SwarmView(anywhere, view.candidates), num_stages, holders, exempt, trains=trains)


def corrects_for_ever(
    view: SwarmView, num_stages: int, holders: Collection[PeerId], exempt: Collection[PeerId], *, trains: bool
) -> StageMove | None:
    """Asks who has refused again."""
    return improve(view, num_stages, holders, trains=trains)


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
    "MovesNobody": (lambda seed: World(seed, decide=moves_nobody), 0),
    "MovesWithoutGain": (lambda seed: World(seed, decide=moves_without_gain), 3),
    "TakesTheLastOne": (lambda seed: World(seed, decide=takes_the_last_one), 0),
    "MovesThePinned": (lambda seed: World(seed, decide=moves_the_pinned), 48),
    "CorrectsNothing": (lambda seed: World(seed, correct=corrects_nothing), 10),
    "CorrectsWithoutHosts": (lambda seed: World(seed, correct=corrects_without_hosts), 37),
    "CorrectsForEver": (lambda seed: World(seed, correct=corrects_for_ever), 46),
    "WaitsForItself": (lambda seed: World(seed, server_class=WaitsForItself), 1),
}
