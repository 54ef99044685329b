"""A newcomer whose whole state takes longer than a round arrives, as long as the averages of a round do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.simulation.state.slow_world import Broken, SlowWorld

from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import StateChain
from shoal.swarm.state_keeping import PieceKey, StateKeeping


@pytest.mark.parametrize("slowness", [0.3, 0.9, 1.2, 1.5, 1.7])
def test_a_newcomer_arrives_whose_state_takes_so_many_rounds(slowness: float) -> None:
    for seed in range(60):
        try:
            SlowWorld(seed, slowness).run()
        except Broken as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_one_that_is_too_slow_for_the_ring_does_not_arrive_and_begins_again_and_again() -> None:
    world = SlowWorld(1, 2.6)
    with pytest.raises(Broken, match="nothing loaded"):
        world.run()
    assert world.num_restarts > 5


def test_one_that_is_too_slow_arrives_when_a_round_takes_long_enough() -> None:
    for seed in range(60):
        assert SlowWorld(seed, 2.6, calm_round=12).run() in (12, 13)


class BeginsAgain(StateChain):
    """Every record replaces what is being fetched."""

    def follow(self, order: Fetch) -> bool:
        followed = super().follow(order)
        self.restart()
        return followed

    def is_lost(self, is_offered: bool, is_gone: bool) -> bool:
        return True


class KeepsNoAverages(StateKeeping):
    """Holders keep what is read, and nothing that leads on from it."""

    @property
    def is_followed(self) -> bool:
        return False


class KeepsNoState(StateKeeping):
    """Holders keep averages, and only the newest state."""

    def _read_states(self, pieces: object) -> list[PieceKey]:
        return []


class KeepsTheOldest(StateKeeping):
    """Of two states that are read the older one is kept, although nobody reads it any more."""

    def _read_states(self, pieces: object) -> list[PieceKey]:
        return sorted(super()._read_states(pieces), key=lambda key: int(key.record_hash[1:]))


class NeverGivesUp(StateChain):
    """Waits for ever for what nobody keeps."""

    def is_lost(self, is_offered: bool, is_gone: bool) -> bool:
        return False


def never_arrives(make: Callable[[int], SlowWorld]) -> bool:
    def breaks(seed: int) -> bool:
        try:
            make(seed).run()
        except Broken:
            return True
        return False

    return any(breaks(seed) for seed in range(60))


def test_beginning_again_with_each_record_is_noticed() -> None:
    assert never_arrives(lambda seed: SlowWorld(seed, 1.5, chain_class=BeginsAgain))


def test_waiting_for_what_nobody_keeps_is_noticed() -> None:
    assert never_arrives(lambda seed: SlowWorld(seed, 2.6, chain_class=NeverGivesUp, calm_round=12))


@pytest.mark.parametrize("keeping", [KeepsNoAverages, KeepsNoState, KeepsTheOldest])
def test_leaving_out_a_rule_of_the_holders_is_noticed(keeping: type[StateKeeping]) -> None:
    assert never_arrives(lambda seed: SlowWorld(seed, 1.7, keeping_class=keeping))
