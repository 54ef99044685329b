"""Fixtures for every test: the event loop, and a check that a test leaves nothing behind.

`SHOAL_REQUIRE_ALL=1` (set by continuous integration) turns a test that would be skipped into a failure. With
`SHOAL_PORTABLE=1` everything does without the calls that only Linux has (`runtime/linux_calls.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# As `make` has it: threads that wait for one another while other tests compute take three times the CPU time. Before
# anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A quarter of what a p2pd computes in a short run is the collection of garbage at its start.
os.environ.setdefault("GOGC", "400")

import hypothesis
import pytest
from tests.emitted import FOLDER, pytest_sessionfinish, record
from tests.hanging import pytest_pyfunc_call, pytest_timeout_cancel_timer, pytest_timeout_set_timer
from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_report_header

from shoal.runtime.linux_calls import FORCE_PORTABLE, available_calls

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_pyfunc_call",
    "pytest_report_header",
    "pytest_sessionfinish",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
]

if FOLDER is not None:
    record()

# How long an example takes says how busy the machine is, and nothing about the code. Continuous integration looks at
# the same examples each time; at a developer's they are new ones.
hypothesis.settings.register_profile(
    "shoal",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=os.environ.get("SHOAL_REQUIRE_ALL") == "1",
)
hypothesis.settings.load_profile("shoal")

_SHM_DIR, _FD_DIR, _TASK_DIR = "/dev/shm", "/proc/self/fd", "/proc/self/task"

# Threads that third parties start once per process and never end; they hold nothing of a test.
_LASTING_THREADS = ("tqdm", "pytest_timeout", "ThreadPoolExecutor-hivemind", "AnyIO worker thread", "torch")

# File descriptors that libraries open once and keep (an event loop's first use, /dev/null, entropy).
_FD_SLACK = 8


@pytest.fixture(scope="session")
def user_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the tests that keep something for the next start a cache of their own, and let them share it.

    All workers of a call have the same one, as the processes of a host do: what is compiled first is for all.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "caches"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "shoal"


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Give the library, which takes a second to import, to those tests that compare with it."""
    return importlib.import_module("transformers")


@pytest.fixture(scope="session")
def peft() -> ModuleType:
    """Give the library, which takes three seconds to import, to those tests that compare with it."""
    return importlib.import_module("peft")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Run async tests on the loop that production uses."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Do without the calls that only Linux has, and have the processes that the test starts do without them."""
    with monkeypatch.context() as patch:
        patch.setenv(FORCE_PORTABLE, "1")
        available_calls.cache_clear()
        yield
    available_calls.cache_clear()


# Where everything does without them, there is one way.
@pytest.fixture(params=["portable"] if os.environ.get(FORCE_PORTABLE) == "1" else ["native", "portable"])
def either_way(request: pytest.FixtureRequest) -> None:
    """Run a test with what the system has, and without the calls that only Linux has."""
    if request.param == "portable":
        request.getfixturevalue("portable")


def _live_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.is_alive() and not t.name.startswith(_LASTING_THREADS)}


def _child_pids() -> set[int]:
    """Return the direct children of this process, on Linux; elsewhere the check is off."""
    children: set[int] = set()
    # Of every test twice: a glob, and paths that are put together, take ten times as long.
    for thread in _names(_TASK_DIR):
        # A thread may have ended since.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"{_TASK_DIR}/{thread}/children") as file:
            children.update(map(int, file.read().split()))
    return children


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "gone"


def _shm_segments() -> set[str]:
    return {name for name in _names(_SHM_DIR) if "shoal" in name}


def _num_fds() -> int:
    return len(_names(_FD_DIR))


def _names(folder: str) -> list[str]:
    """What is in a folder; nothing where a system has none."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _settled(holds: Callable[[], bool]) -> bool:
    """Return whether `holds` becomes true within two minutes: an ended thread or child takes a moment to vanish."""
    pause = threading.Event()
    for _ in range(6000):
        if holds():
            return True
        pause.wait(0.02)
    return holds()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test after which threads, child processes, shared memory or many file descriptors remain."""
    threads, children, segments, num_fds = _live_threads(), _child_pids(), _shm_segments(), _num_fds()
    yield
    problems: list[str] = []
    if not _settled(lambda: _live_threads() <= threads):
        problems.append(f"threads: {sorted(t.name for t in _live_threads() - threads)}")
    if not _settled(lambda: _child_pids() <= children):
        problems.append(f"child processes: {[f'{pid} {_command_of(pid)}' for pid in _child_pids() - children]}")
    # Another test session on this machine may own segments that appear meanwhile: only those with our pid count.
    own = {name for name in _shm_segments() - segments if str(os.getpid()) in name}
    if own:
        problems.append(f"shared memory: {sorted(own)}")
    if _num_fds() > num_fds + _FD_SLACK:
        gc.collect()
        if not _settled(lambda: _num_fds() <= num_fds + _FD_SLACK):
            problems.append(f"file descriptors: {num_fds} before, {_num_fds()} after")
    if problems:
        pytest.fail("the test left behind " + "; ".join(problems))


def pytest_collection_finish() -> None:
    """Have the loggers of torch pass on what they say: to those that do not, fifty, pytest ties itself at each test."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report a skipped test as failed where everything is required to run."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Report a module that skips itself as failed where everything is required to run."""
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report) -> None:
    # Without the calls of Linux those tests are left out that are about them.
    required = os.environ.get("SHOAL_REQUIRE_ALL") == "1" and os.environ.get(FORCE_PORTABLE) != "1"
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped although SHOAL_REQUIRE_ALL=1: {report.longrepr}"
