"""`shoal model profile`: units, costs and the cut, for people and for programs."""

from __future__ import annotations

import json

import pytest

from shoal.cli import main

Capture = pytest.CaptureFixture[str]
SMALL = ("--model.num-layers=2", "--model.hidden-size=16", "--model.num-heads=2", "--data.seq-len=8", "--device=cpu")


@pytest.mark.parametrize(("flags", "decided"), [((), "measured"), (("--deterministic",), "static")])
def test_the_json_says_what_each_unit_costs_and_who_decides(
    flags: tuple[str, ...], decided: str, capsys: Capture
) -> None:
    assert main(["model", "profile", "--json", *SMALL, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [unit["name"] for unit in report["units"]] == ["embedding", "block_0", "block_1", "head"]
    assert all(unit["measured_s"] > 0 and unit["static"] > 0 for unit in report["units"])
    assert report["decided_by"] == decided
    assert report["cut"] == report[f"{decided}_cut"]
    assert sum(report["cut"]) == 4
    assert report["warnings"] == []


def test_the_table_shows_the_stage_of_each_unit(capsys: Capture) -> None:
    assert main(["model", "profile", *SMALL, "--model-pipeline.stages=2", "--model-pipeline.cut=1,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["0", "embedding"],
        ["1", "block_0"],
        ["1", "block_1"],
        ["1", "head"],
    ]
    assert "cut: 1 + 3 units, by hand" in lines
    assert any(line.startswith("slowest stage: ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-pipeline.cut=2,3"], "has 4: the embedding, 2 blocks and the head"),
        (["--model-pipeline.cutt=2,2"], "unknown flag"),
        (["--model.family=nowhere:Model"], "cannot import nowhere"),
        (["--jsn"], "unknown flag"),
    ],
)
def test_wrong_input_is_an_error_of_the_user(flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["model", "profile", *SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_family_that_cannot_run_alone_is_shown_with_its_own_figures_and_is_a_failure(capsys: Capture) -> None:
    family = "--model.family=tests.unit.server.test_unit_costs:Sociable"
    assert main(["model", "profile", *SMALL, family]) == 1
    shown = capsys.readouterr().out
    assert "warning: the units of the model could not be measured" in shown
    assert "by the family's own figures" in shown
