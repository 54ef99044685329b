"""Seeds that have failed once, each of which `make test` runs; see `seeds/README.md`."""

from __future__ import annotations

import json

import pytest
from tests.simulation.__main__ import SEEDS
from tests.simulation.parts import violation

FOUND = sorted(path.stem for path in SEEDS.glob("*.json"))


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_mended(name: str) -> None:
    entry = json.loads((SEEDS / f"{name}.json").read_text())
    assert violation(entry["world"], entry["seed"]) is None
