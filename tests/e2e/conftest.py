"""One short run of the sandbox that several tests look at, and how long something may be left of a run."""

from __future__ import annotations

import pytest
from tests.e2e.launched import ALL_GONE_S, END_S, SMALL, Launched, completed

from shoal.bench.busy import calibrate


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two rounds of four steps with seed 7, ended with exit code 0 and nothing left."""
    return completed(tmp_path_factory.mktemp("short"), *SMALL, "--run.seed=7")


@pytest.fixture
def gone_within_s() -> float:
    """How long something may be left: what is promised on an idle machine, on another one only that it goes."""
    return ALL_GONE_S if calibrate().idle else END_S
