"""Which cases of a benchmark are measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.errors import ConfigError
from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.command import _chosen

CASES = [Case(name, "s", lambda: 1.0, None) for name in ("small plain", "small tls", "large")]


def test_only_the_cases_with_that_in_their_names_are_measured() -> None:
    assert _chosen(CASES, BenchmarkOptions()) == CASES
    assert _chosen(CASES, BenchmarkOptions(only="small")) == CASES[:2]
    with pytest.raises(ConfigError, match="--only medium: no case has that in its name"):
        _chosen(CASES, BenchmarkOptions(only="medium"))


def test_the_list_of_benchmarks_is_there_without_torch() -> None:
    code = "import sys; from shoal.cli import main; main(['benchmark']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ring" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"
