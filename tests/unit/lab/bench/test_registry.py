"""Which benchmarks there are, and what is said about others."""

from __future__ import annotations

import importlib.util

import pytest

from shoal.cli import main
from shoal.errors import ConfigError
from shoal_lab.bench.case import BenchmarkOptions
from shoal_lab.bench.registry import BENCHMARKS, Benchmark, find_benchmark, load_open_cases

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_module_and_its_line(name: str) -> None:
    benchmark = find_benchmark(name, BenchmarkOptions())
    assert importlib.util.find_spec(benchmark.module) is not None
    assert benchmark.summary


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["codex"], "unknown benchmark codex; did you mean codec?"),
        (["everything"], f"unknown benchmark everything; there are {', '.join(BENCHMARKS)}."),
        (["codec", "--repeat", "0"], "--repeat 0: at least 1"),
        (["codec", "--repeat", "many"], "--repeat"),
        (["codec", "--link", "20mbit"], "--link 20mbit: nothing in the benchmark codec goes over a link"),
        (["codec", "--jsn"], "Did you mean --json?"),
    ],
)
def test_wrong_arguments_are_one_message_and_exit_code_2(arguments: list[str], part: str, capsys: Capture) -> None:
    assert main(["benchmark", *arguments]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert not captured.out


def test_without_a_name_the_names_are_listed(capsys: Capture) -> None:
    assert main(["benchmark"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


def test_a_reference_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = Benchmark("no_such_library.of_ours", "compares with nothing")
    with pytest.raises(ConfigError, match="compares with no_such_library, which is not installed"):
        load_open_cases("codec", benchmark)


def test_a_module_of_ours_that_is_missing_is_a_bug_and_not_the_users_fault() -> None:
    with pytest.raises(ModuleNotFoundError):
        load_open_cases("codec", Benchmark("shoal_lab.bench.no_such_module", ""))
