"""One short run of the sandbox that several tests look at."""

from __future__ import annotations

import pytest
from tests.e2e.launched import SMALL, Launched, completed


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two rounds of four steps with seed 7, ended with exit code 0 and nothing left."""
    return completed(tmp_path_factory.mktemp("short"), *SMALL, "--run.seed=7")
