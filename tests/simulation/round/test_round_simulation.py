"""The machines of the outer round under seeded faults: always safe, and going on once the faults have ended."""

from __future__ import annotations

import pytest
from tests.simulation.round.mutants import COORDINATORS, MEMBERS
from tests.simulation.round.world import Broken, World

from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_member import RoundMemberMachine

SEEDS_PER_BLOCK = 25
MUTANT_SEEDS = 400
RARE = {"NoEpochs": 314, "FetchesOnce": 202, "ReadmitsNobody": 42, "MixesBases": 43, "RestoresAtOnce": 42}
"""Where to look first for a schedule that breaks a mutant that few of them break."""


@pytest.mark.parametrize("block", range(10))
def test_rounds_stay_safe_and_go_on(block: int) -> None:
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_every_round_is_decided_without_faults() -> None:
    for seed in range(10):
        assert World(seed, faults=False).run() >= 20


@pytest.mark.parametrize("mutant", [*COORDINATORS, *MEMBERS], ids=lambda mutant: mutant.__name__)
def test_leaving_a_rule_out_is_noticed(
    mutant: type[RoundCoordinatorMachine] | type[RoundMemberMachine],
) -> None:
    def run(seed: int) -> None:
        if issubclass(mutant, RoundMemberMachine):
            World(seed, member_class=mutant).run()
        else:
            World(seed, coordinator_class=mutant).run()

    def breaks(seed: int) -> bool:
        try:
            run(seed)
        except Broken:
            return True
        return False

    first = RARE.get(mutant.__name__, 0)
    assert any(breaks(seed) for seed in (*range(first, MUTANT_SEEDS), *range(first)))
