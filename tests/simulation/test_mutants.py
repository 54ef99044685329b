"""The gate: whatever rule is left out, the simulation notices, within a bounded number of seeds."""

from __future__ import annotations

import pytest
from tests.simulation.mutants import GATE_SEEDS, MUTANTS


@pytest.mark.parametrize("name", MUTANTS)
def test_leaving_a_rule_out_is_noticed(name: str) -> None:
    mutant = MUTANTS[name]
    seeds = range(mutant.first_seed, mutant.first_seed + GATE_SEEDS)
    assert mutant.noticed(seeds) is not None, f"none of the seeds {seeds} notices; `--mutants` looks for others"
