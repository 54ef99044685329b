"""`make sim`: what it prints, with what it exits, and what it leaves of a seed that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation import __main__ as runner
from tests.simulation.catalogue import Entry
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken


class Odd:
    """A world that breaks with odd seeds, and once by an error of a machine."""

    def __init__(self, seed: int) -> None:
        self.network, self.seed = Kernel(seed), seed

    def run(self) -> None:
        if self.seed == 7:
            raise KeyError("a machine's own")
        if self.seed % 2:
            raise Broken(f"{self.seed} is odd")


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(runner.WORLDS, "odd", Entry(Odd, 1))
    monkeypatch.setattr(runner, "SEEDS", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["simulation", *arguments, "--world", "odd", "--processes", "1"])
    return runner.main()


def test_violations_are_printed_kept_and_counted(
    monkeypatch: pytest.MonkeyPatch, odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "4:8") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("4 schedules, 2 violations, ")
    assert lines[-1].endswith("/min")
    assert lines[0] == "odd 5: 5 is odd"
    assert lines[1].strip() == "python -m tests.simulation 5 --world odd"
    assert sorted(path.name for path in odd.iterdir()) == ["odd-5.json", "odd-7.json"]
    assert json.loads((odd / "odd-5.json").read_text()) == {"world": "odd", "seed": 5, "violated": "5 is odd"}


def test_without_violations_it_exits_0_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "4:5") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 schedules, 0 violations, ")
    assert list(odd.iterdir()) == []


def test_one_seed_is_shown(monkeypatch: pytest.MonkeyPatch, odd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "5") == 1
    assert capsys.readouterr().out == "odd 5: Broken: 5 is odd\n"


def test_each_commit_has_seeds_of_its_own_and_says_which(
    monkeypatch: pytest.MonkeyPatch, odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_COMMIT_SEEDS", 2)
    ranges: list[str] = []
    for commit in ("00000ff" + "0" * 33, "00000fe" + "f" * 33):
        monkeypatch.setattr(runner, "present_commit", lambda commit=commit: commit)
        assert run(monkeypatch, "HEAD") == 1
        told = capsys.readouterr().out.splitlines()
        assert told[0].startswith(f"the seeds of commit {commit[:7]}: make sim SEEDS=")
        assert told[-1].startswith("2 schedules, 1 violations")
        ranges.append(told[0].partition("SEEDS=")[2])
        assert run(monkeypatch, ranges[-1]) == 1
        assert capsys.readouterr().out.splitlines()[0] == told[1], "the command shows the same"
    assert ranges == ["510:512", "508:510"]


def test_ci_runs_the_seeds_of_its_commit() -> None:
    root = Path(__file__).parents[2]
    assert "-m tests.simulation HEAD" in (root / ".ci" / "run").read_text()


def test_seeds_are_shared_by_processes_that_the_command_starts() -> None:
    command = [sys.executable, "-m", "tests.simulation", "0:50", "--world", "lease", "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("50 schedules, 0 violations, ")
