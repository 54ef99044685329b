"""Which cases of a benchmark are measured."""

from __future__ import annotations

import pytest

from shoal.bench.case import BenchmarkOptions, Case
from shoal.cli.benchmark import _chosen
from shoal.errors import ConfigError

CASES = [Case(name, "s", lambda: 1.0, None, larger_is_better=False) for name in ("small plain", "small tls", "large")]


def test_only_the_cases_with_that_in_their_names_are_measured() -> None:
    assert _chosen(CASES, BenchmarkOptions()) == CASES
    assert _chosen(CASES, BenchmarkOptions(only="small")) == CASES[:2]
    with pytest.raises(ConfigError, match="--only medium: no case has that in its name"):
        _chosen(CASES, BenchmarkOptions(only="medium"))
