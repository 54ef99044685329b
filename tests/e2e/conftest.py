"""One short run of the sandbox that several tests look at, and how long something may be left of a run."""

from __future__ import annotations

import pytest
from tests.e2e.launched import END_S, SMALL, Launched, completed


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two rounds of four steps with seed 7, ended with exit code 0 and nothing left."""
    return completed(tmp_path_factory.mktemp("short"), *SMALL, "--run.seed=7")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has time train every configuration, and whoever has an idle machine judge the time as well."""
    parser.addoption("--every-config", action="store_true", help="train every configuration, not one for each task")
    parser.addoption("--gone-within", type=float, default=END_S, help="seconds until nothing may be left of a run")


@pytest.fixture
def gone_within_s(pytestconfig: pytest.Config) -> float:
    """How long something of an ended run may be left; without the option nothing hangs on time."""
    # Without a path of theirs on the command line, pytest reads these options too late to know them.
    return pytestconfig.getoption("--gone-within", default=END_S)
