"""Promise 2 under hundreds of fault schedules: a step is applied everywhere or nowhere, no sample is lost or doubled."""

from __future__ import annotations

import pytest

from tests.simulation.step.world import World

SEEDS_PER_TEST = 50


@pytest.mark.parametrize("first_seed", range(0, 300, SEEDS_PER_TEST))
def test_steps_are_atomic_and_every_sample_is_trained_once(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        try:
            World(seed).run()
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error}")
