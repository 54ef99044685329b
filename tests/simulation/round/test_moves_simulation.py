"""Servers that move, under seeded faults: rounds stay safe, one moves at a time, and in the end all are in place."""

from __future__ import annotations

import pytest
from tests.simulation.round.moving import MovingWorld
from tests.simulation.round.moving_mutants import FollowsEveryOrder, TwoMovers
from tests.simulation.round.world import Broken

SEEDS_PER_BLOCK = 20


@pytest.mark.parametrize("block", range(5))
def test_rounds_stay_safe_and_servers_get_to_where_they_are_needed(block: int) -> None:
    switched = 0
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        world = MovingWorld(seed)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        switched += world.num_switched
    assert switched > SEEDS_PER_BLOCK // 2


def test_a_successor_sends_no_second_server_when_the_coordinator_dies_after_an_order() -> None:
    switched = 0
    for seed in range(30):
        world = MovingWorld(seed, faults=False, coordinators_die=True)
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        switched += world.num_switched
    assert switched > 20


@pytest.mark.parametrize("mutant", [{"orders_class": TwoMovers}, {"member_class": FollowsEveryOrder}], ids=str)
def test_leaving_a_rule_out_is_noticed(mutant: dict[str, type]) -> None:
    def breaks(seed: int) -> bool:
        try:
            MovingWorld(seed, **mutant).run()
        except Broken:
            return True
        return False

    assert any(breaks(seed) for seed in range(100))
