"""Servers join and die; the coordinator moves others, round by round: no more than is needed.

Everything is decided by the machines that production runs; only the way of a mover is played here: it answers, is away,
and holds the record of its new stage a round later, refuses, or dies on the way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.swarm.test_reassignment import server, strengths

from shoal.ids import NO_BALLOT, PeerId
from shoal.swarm.move_orders import Begun, Ended, MoveEffect, MoveEnd, MoveOrders
from shoal.swarm.placement import StageMove
from shoal.swarm.view import SwarmView
from shoal.wire.messages.round import Moving

PATIENT_S = 200.0
"""Between two rounds: longer than any patience of the machine, so that what is lost is forgotten by then."""


@dataclass
class World:
    """A coordinator and its servers."""

    rng: random.Random
    num_stages: int
    view: SwarmView = field(default_factory=SwarmView)
    now_s: float = 0.0
    round: int = 0
    born: int = 0
    moves: list[StageMove] = field(default_factory=list)
    refusing: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.machine = MoveOrders(self.num_stages)
        for stage in range(self.num_stages):
            self.joins(stage)

    @property
    def known(self) -> dict[PeerId, int]:
        return {replica.peer: replica.stage for replica in self.view.replicas}

    def joins(self, stage: int | None = None) -> None:
        """A newcomer takes the stage with the fewest servers, as `swarm.assignment` has it."""
        if stage is None:
            now = strengths(self.view, self.num_stages)
            stage = now.index(min(now))
        self.born += 1
        new = server(f"p{self.born:03}", stage, age=1000.0 - self.born)
        self.view = replace(self.view, replicas=(*self.view.replicas, new))

    def dies(self) -> None:
        self.view = self.view.without({self.rng.choice(self.view.replicas).peer})

    def ends_round(self, *, dies_on_the_way: bool = False) -> list[StageMove]:
        """Commit a record, and play what follows from it until nothing is under way; returns the moves."""
        self.round += 1
        self.now_s += PATIENT_S
        begun = self._follow(self.machine.recorded(self.view, self.known, self.round, self.now_s), dies_on_the_way)
        # A gap is filled within the round, however often somebody refuses.
        for _ in range(len(self.view.replicas) + 2):
            self.now_s += 2.0
            begun += self._follow(self.machine.update(self.view, self.known, self.known, self.now_s), dies_on_the_way)
        assert self.machine.under_way is None
        return begun

    def _follow(self, effects: list[MoveEffect], dies_on_the_way: bool) -> list[StageMove]:
        moves = [effect.move for effect in effects if isinstance(effect, Begun)]
        assert len(moves) <= 1, "one at a time"
        for move in moves:
            self._play(move, dies_on_the_way)
        return moves

    def _play(self, move: StageMove, dies_on_the_way: bool) -> None:
        assert Counter(self.known.values())[move.origin] > 1, "never the last of a stage"
        if move.peer in self.refusing:
            ended = self.machine.receive(move.peer, Moving(NO_BALLOT, move.stage, "too small"), self.now_s)
            assert [type(each) for each in ended] == [Ended]
            return
        assert self.machine.receive(move.peer, Moving(NO_BALLOT, move.stage, ""), self.now_s) == []
        self.machine.lost(move.peer)
        if dies_on_the_way:
            self.view = self.view.without({move.peer})
            self.now_s += 11.0
            how = MoveEnd.LOST
        else:
            self.view = self.view.placed({move.peer: move.stage})
            self.moves.append(move)
            how = MoveEnd.ARRIVED
        ended = [e for e in self.machine.update(self.view, self.known, self.known, self.now_s) if isinstance(e, Ended)]
        assert [each.how for each in ended] == [how]


def settle(world: World) -> list[StageMove]:
    """Let rounds pass until nobody has moved for longer than any server rests; returns the moves."""
    before, quiet = len(world.moves), 0
    for _ in range(20 * len(world.view.replicas) + 20):
        quiet = 0 if world.ends_round() else quiet + 1
        if quiet > 4:
            return world.moves[before:]
    raise AssertionError(f"it never settles: {world.moves[before:]}")


def needed(before: list[int], after: list[int]) -> int:
    """The fewest moves after which the weakest stage is as strong as it is afterwards."""
    return sum(max(0, min(after) - each) for each in before)


@pytest.mark.parametrize("block", range(8))
def test_servers_move_as_rarely_as_can_be_and_never_back(block: int) -> None:
    num_moves = 0
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(seed)
        world = World(rng, rng.randint(2, 5))
        for _ in range(12):
            for _ in range(rng.randint(1, 4)):
                if rng.random() < 0.5 and len(world.view.replicas) > world.num_stages:
                    world.dies()
                else:
                    world.joins(rng.choice([None, rng.randrange(world.num_stages)]))
            before = strengths(world.view, world.num_stages)
            moves = settle(world)
            after = strengths(world.view, world.num_stages)
            assert len(moves) == needed(before, after), f"seed {seed}: {before} -> {after} by {moves}"
            assert len({move.peer for move in moves}) == len(moves), f"seed {seed}: nobody moves twice: {moves}"
            num_moves += len(moves)
    assert num_moves > 50, "the test has seen moves"


@pytest.mark.parametrize("block", range(4))
def test_who_refuses_or_dies_on_its_way_is_replaced_and_the_rest_settles(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        rng = random.Random(f"refusals {seed}")
        world = World(rng, rng.randint(2, 4))
        for _ in range(rng.randint(3, 9)):
            world.joins(rng.randrange(world.num_stages))
        world.refusing = {r.peer for r in world.view.replicas if rng.random() < 0.3}
        for _ in range(4):
            world.ends_round(dies_on_the_way=rng.random() < 0.3)
        gap = rng.randrange(world.num_stages)
        world.view = world.view.without({r.peer for r in world.view.by_stage(gap)})
        could_go = [
            r for r in world.view.replicas if r.peer not in world.refusing and len(world.view.by_stage(r.stage)) > 1
        ]
        world.ends_round()
        others_served = all(world.view.by_stage(stage) for stage in range(world.num_stages) if stage != gap)
        assert world.view.by_stage(gap) or not could_go or not others_served, f"seed {seed}"
        for _ in range(4 * len(world.view.replicas)):
            world.ends_round()
        settled = len(world.moves)
        for _ in range(6):
            world.ends_round()
        assert len(world.moves) == settled, f"seed {seed}"
