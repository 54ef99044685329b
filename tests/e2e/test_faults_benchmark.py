"""The benchmark of faults is ended by a signal: it ends the swarm that it measures, and the hosts that it has made."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, ROOT, START_S, until
from tests.e2e.needs import needs_namespaces

from shoal.runtime.process_info import with_environment

pytestmark = pytest.mark.slow

_NAMESPACES = Path("/run/netns")


@dataclass
class Benchmark:
    """One running benchmark; all its processes carry its tag."""

    process: subprocess.Popen[str]
    tag: str

    def others(self) -> list[int]:
        """Return the living processes that it has started, and those that these have started."""
        return [pid for pid in with_environment(self.tag) if pid != self.process.pid]

    def runs_a_swarm(self) -> bool:
        """Whether there are the launcher of a run, its fork server and roles."""
        assert self.process.poll() is None
        return len(self.others()) > 4

    def namespaces(self) -> list[Path]:
        """Return the named network namespaces that its processes are in; other tests may have some at the same time."""
        used: set[int] = set()
        for pid in self.others():
            with suppress(OSError):  # it has ended since
                used.add(Path(f"/proc/{pid}/ns/net").stat().st_ino)
        found: list[Path] = []
        for path in _NAMESPACES.iterdir():
            with suppress(FileNotFoundError):  # another test's that is gone since
                if path.stat().st_ino in used:
                    found.append(path)
        return found


@contextmanager
def measuring(kind: str, directory: Path) -> Iterator[Benchmark]:
    name, value = "TAG_OF_TEST_BENCHMARK", secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "benchmarks/faults.py", f"--kinds={kind}", "--repeat=1", f"--keep-logs={directory}"],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    benchmark = Benchmark(process, f"{name}={value}")
    try:
        yield benchmark
    finally:
        process.kill()
        process.communicate()
        for pid in benchmark.others():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ends_everything(benchmark: Benchmark, number: signal.Signals, moment: Callable[[], bool]) -> None:
    until(moment, START_S, "a swarm that is being measured")
    benchmark.process.send_signal(number)
    output, _ = benchmark.process.communicate(timeout=END_S)
    assert benchmark.process.returncode == 128 + number, output
    until(lambda: not benchmark.others(), END_S, "the end of all that it has started")
    assert "Traceback" not in output


def test_a_benchmark_that_is_terminated_ends_its_swarm(tmp_path: Path) -> None:
    with measuring("server", tmp_path) as benchmark:
        _ends_everything(benchmark, signal.SIGTERM, benchmark.runs_a_swarm)


@needs_namespaces
def test_a_benchmark_that_is_interrupted_ends_its_hosts(tmp_path: Path) -> None:
    with measuring("link-down", tmp_path) as benchmark:
        until(benchmark.runs_a_swarm, START_S, "a swarm that is being measured")
        namespaces = benchmark.namespaces()
        _ends_everything(benchmark, signal.SIGINT, benchmark.runs_a_swarm)
    assert namespaces
    assert not [path.name for path in namespaces if path.exists()]
