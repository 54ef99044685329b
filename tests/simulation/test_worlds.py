"""A slice of every world, about a minute of one core in all; more of them: `make sim SEEDS=1000:20000`."""

from __future__ import annotations

import pytest
from tests.simulation.catalogue import WORLDS
from tests.simulation.parts import violation

BLOCK = 50
BLOCKS = [(name, first) for name, entry in WORLDS.items() for first in range(0, entry.slice_seeds, BLOCK)]


@pytest.mark.parametrize(("world", "first"), BLOCKS)
def test_no_schedule_breaks_a_promise(world: str, first: int) -> None:
    stop = min(first + BLOCK, WORLDS[world].slice_seeds)
    found = [(seed, what) for seed in range(first, stop) if (what := violation(world, seed)) is not None]
    assert not found, f"{found}; the first one again: python -m tests.simulation {found[0][0]} --world {world}"
