"""A short run of the sandbox that several tests look at, how long something may be left of a run, and what is first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
from benchmarks import resume_points
from tests.e2e.launched import END_S, SMALL, Launched, completed, launched
from tests.e2e.warm import template

from shoal_lab import small_runs
from shoal_lab.chaos import session

DEAREST = (
    "test_memory.py",
    "test_tasks.py",
    "test_up.py",
    "test_fault_points.py",
    "test_resume_points.py",
    "test_configs.py",
    "test_variants.py::test_a_run_of_compiled_stages",
    "test_link_faults.py",
    "test_moving.py",
    "test_chaos.py",
    "test_any_one_death.py",
)
"""The beginnings of what takes a minute or more."""


@pytest.fixture(scope="session", autouse=True)
def starts_have_time() -> Iterator[None]:
    """Give the DHT nodes of all runs a minute to start: several swarms start on the same cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_NETWORK__BOOTSTRAP_TIMEOUT_S", "60")
        yield


@pytest.fixture(scope="session", autouse=True)
def launchers_are_forked(pytestconfig: pytest.Config, starts_have_time: None) -> Iterator[None]:
    """Import for the launchers once; with `--cold` each imports for itself, as those of users do."""
    with contextlib.nullcontext() if pytestconfig.getoption("--cold", default=False) else template():
        yield


@pytest.fixture
def forked_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have those launchers forked as well that programs of the checkout start when a test calls them."""
    for program in (resume_points, session, small_runs):
        monkeypatch.setattr(program, "launched", launched)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two rounds of four steps with seed 7, ended with exit code 0 and nothing left."""
    return completed(tmp_path_factory.mktemp("short"), *SMALL, "--run.seed=7", cold=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let whoever has time train every configuration, and whoever has an idle machine judge the time as well."""
    parser.addoption("--every-config", action="store_true", help="train every configuration, not one for each task")
    parser.addoption("--cold", action="store_true", help="start each run as users do, with all of its imports")
    parser.addoption("--gone-within", type=float, default=END_S, help="seconds until nothing may be left of a run")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have each worker begin with some of the dearest tests: at the end the others would wait for whoever has the last.

    With `--dist worksteal` the first worker gets the first tests, the next one the next, and who has none left takes
    from the end of what others have.
    """
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_workers == 1 or not all(item.nodeid.startswith("tests/e2e/") for item in items):
        return
    ranks = {item: _rank(item) for item in items}
    dearest = sorted((item for item in items if ranks[item] < len(DEAREST)), key=lambda item: ranks[item])
    others = [item for item in items if ranks[item] == len(DEAREST)]
    share = math.ceil(len(others) / num_workers)
    items[:] = [
        item
        for worker in range(num_workers)
        for item in (*dearest[worker::num_workers], *others[worker * share : (worker + 1) * share])
    ]


def _rank(item: pytest.Item) -> int:
    name = item.nodeid.removeprefix("tests/e2e/")
    return next((rank for rank, beginning in enumerate(DEAREST) if name.startswith(beginning)), len(DEAREST))


@pytest.fixture
def gone_within_s(pytestconfig: pytest.Config) -> float:
    """How long something of an ended run may be left; without the option nothing hangs on time."""
    # Without a path of theirs on the command line, pytest reads these options too late to know them.
    return pytestconfig.getoption("--gone-within", default=END_S)
