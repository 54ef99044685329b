"""Promise 2 under hundreds of fault schedules: a step is applied everywhere or nowhere, no sample twice."""

from __future__ import annotations

import pytest
from tests.simulation.step import mutants
from tests.simulation.step.world import World

from shoal.errors import RemoteProtocolError
from shoal.swarm.step_operations import Schedule
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import StepTrainer

SEEDS_PER_TEST = 50
MUTANT_SEEDS = 200
RARE = {"AbortsWithoutWaitingForTheSilent": 116, "PromisesNothing": 30, "IgnoresFences": 30}
"""Where to look first for a schedule that breaks a mutant that few of them break."""


@pytest.mark.parametrize("first_seed", range(0, 200, SEEDS_PER_TEST))
def test_steps_are_atomic_and_every_sample_is_trained_once(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        try:
            World(seed).run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")


@pytest.mark.parametrize("mutant", mutants.REPLICAS)
def test_a_replica_that_breaks_a_rule_is_noticed(mutant: type[StepReplica]) -> None:
    schedule = Schedule.ONE_F_ONE_B
    assert any(_is_noticed(World(seed, replica_class=mutant, schedule=schedule)) for seed in _seeds(mutant))


@pytest.mark.parametrize("mutant", mutants.SPLITTING_REPLICAS)
def test_a_replica_that_breaks_a_rule_of_split_backwards_is_noticed(mutant: type[StepReplica]) -> None:
    schedule = Schedule.ZERO_BUBBLE
    assert any(_is_noticed(World(seed, replica_class=mutant, schedule=schedule)) for seed in _seeds(mutant))


@pytest.mark.parametrize("mutant", mutants.TRAINERS)
def test_a_trainer_that_breaks_a_rule_is_noticed(mutant: type[StepTrainer]) -> None:
    schedule = Schedule.ONE_F_ONE_B
    assert any(_is_noticed(World(seed, trainer_class=mutant, schedule=schedule)) for seed in _seeds(mutant))


def _seeds(mutant: type) -> list[int]:
    first = RARE.get(mutant.__name__, 0)
    return [*range(first, MUTANT_SEEDS), *range(first)]


def _is_noticed(world: World) -> bool:
    try:
        world.run()
    except (AssertionError, RemoteProtocolError):
        return True
    return False
