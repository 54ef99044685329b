"""What `shoal chaos` says last and with which exit code, whatever its swarm has come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.arguments import parse_duration_s
from shoal.errors import ConfigError, RunFailed
from shoal_lab.chaos import command
from shoal_lab.chaos.session import RunOutcome
from shoal_lab.launched import Launched
from shoal_lab.observed import Swarm
from shoal_lab.verdict import Evidence, Finding

GOOD = (Finding("hashes", "8 states equal"), Finding("samples", "64 samples, duplicates 0, missing 0"))
BAD = (*GOOD, Finding("chain", "chain of 3 records", ("record 2 is missing before record 3",)))


def _ran(monkeypatch: pytest.MonkeyPatch, *results: object) -> None:
    """Let the runs of the command end so, without any swarm."""
    left = list(results)

    def run(directory: Path, *_: object) -> object:
        result = left.pop(0)
        if isinstance(result, BaseException):
            raise result
        findings, samples, kept = result
        evidence = Evidence(Swarm(Launched(directory, (), runtime_dir=directory), [], 2), 130, ())
        return command._JudgedRun(RunOutcome(evidence, (), (), 20.0, samples, kept), findings)

    monkeypatch.setattr(command, "_run", run)


def _chaos(tmp_path: Path, *flags: str) -> int:
    return main(["chaos", "--seed", "3", "--for", "20s", "--every", "10s", f"--log-dir={tmp_path}", *flags])


def test_the_last_line_is_the_verdict_and_0_the_exit_code_if_all_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(monkeypatch, (GOOD, 800, 700))
    assert _chaos(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "chaos holds: seed 3: 8 states equal, 64 samples, duplicates 0, missing 0, throughput 40.0 samples/s, kept 35.0"
    )


def test_one_violation_breaks_it_and_is_named_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(monkeypatch, (BAD, 800, 800))
    assert _chaos(tmp_path, f"--json={tmp_path / 'report.json'}") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "chaos BROKEN: seed 3: chaos: chain: record 2 is missing before record 3"
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["holds"], report["seed"], len(report["plan"])) == (False, 3, 2)
    assert report["problems"] == ["chaos: chain: record 2 is missing before record 3"]


def test_a_run_that_ends_by_itself_breaks_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(monkeypatch, RunFailed("the run has ended with exit code 1:\nno server is left"))
    assert _chaos(tmp_path) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "chaos BROKEN: seed 3: the run has ended with exit code 1: no server is left"


def test_throughput_and_kept_work_are_ratios_to_the_run_without_faults_which_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _ran(monkeypatch, (GOOD, 1000, 1000), (GOOD, 800, 700))
    assert _chaos(tmp_path, "--goodput", f"--json={tmp_path / 'report.json'}") == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith("throughput 80.0% and kept 70.0% of 50.0 samples/s without faults")
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["throughput_ratio"], report["kept_ratio"]) == pytest.approx((0.8, 0.7))


def test_a_violation_of_the_run_without_faults_counts_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _ran(monkeypatch, (BAD, 1000, 1000), (GOOD, 800, 800))
    assert _chaos(tmp_path, "--goodput") == 1


def test_ctrl_c_ends_it_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _ran(monkeypatch, KeyboardInterrupt())
    assert _chaos(tmp_path) == 130


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kinds", "meteor"), "no meteor"),
        (("--num-servers=2",), "with one replica of a stage nobody can go on"),
        (("--emulated-device", "30"), "--emulated-device 30: not a duration"),
    ],
)
def test_what_makes_no_chaos_is_the_users_error(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "--for", "20s", "--every", "10s", f"--log-dir={tmp_path}", *flags]) == 2
    assert message in capsys.readouterr().err


def test_durations_are_read_as_people_write_them() -> None:
    assert [parse_duration_s(text, "--for") for text in ("30ms", "15s", "1.5m", "2h")] == [0.03, 15.0, 90.0, 7200.0]
    with pytest.raises(ConfigError, match="--for 10: not a duration"):
        parse_duration_s("10", "--for")
