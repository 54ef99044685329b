"""What the live row says of a run: nothing old looks fresh, and the state is in words."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from shoal.cli.display import plain_line, screen
from shoal.cli.run_row import RunRow

STEP = {"round": 4.0, "step": 390.0, "loss/train": 2.124, "samples_per_s": 116.1, "step_s": 0.5}
SWARM = {"pipelines": 1.0, "alive_peers": 6.0, "replicas/0": 1.0, "replicas/1": 2.0}


def _row(**more: float) -> RunRow:
    """A run of twelve rounds that was launched at 0 s and has committed a step at 100 s."""
    row, numbers = RunRow(12, 0.0), STEP | SWARM | more
    row.update(numbers, dict.fromkeys(numbers, 100.0), 100.0)
    return row


def test_a_run_that_trains_says_so() -> None:
    assert _row().state(101.0) == "training"
    assert plain_line(_row(), 101.0) == (
        "time 1:41  round 4/12  step 390  loss 2.124  samples/s 116.1  pipelines 1  peers 6  training"
    )


def test_what_a_run_waits_for_before_its_first_round_is_said_before_that_servers_come() -> None:
    row = RunRow(12, 0.0)
    row.update({"replicas/0": 0.0}, {}, 1.0)
    row.doing = "opening the data set ./clips, 7 files (for 2 s)"
    assert row.state(2.0) == "starting: opening the data set ./clips, 7 files (for 2 s)"
    row.is_stopping = True
    assert row.state(2.0) == "stopping"
    row.is_stopping, row.doing = False, ""
    assert row.state(2.0) == "starting: stage 0 has no server yet"


def test_a_model_with_experts_says_how_uneven_their_loads_are() -> None:
    line = plain_line(_row(**{"router/load_cv": 0.312}), 104.0)
    assert "  load cv 0.312 (4 s ago)  samples/s" in line


def test_a_run_that_is_paused_says_so_and_what_it_will_lack() -> None:
    row = _row(paused=1.0)
    assert row.state(160.0) == "paused"
    row.update({"replicas/1": 0.0}, {}, 160.0)
    assert row.state(165.0) == "paused; stopped: stage 1 has no server for 5 s"
    row.update({"paused": 0.0, "replicas/1": 1.0}, {}, 170.0)
    assert row.state(170.0) == "no step for 70 s"


def test_a_swarm_that_stands_still_is_said_to_be_stopped_and_none_of_its_numbers_looks_fresh() -> None:
    row = _row()
    row.update({"replicas/1": 0.0, "pipelines": 0.0, "alive_peers": 4.0}, {}, 102.0)
    row.update({"replicas/1": 0.0}, {}, 120.0)
    assert plain_line(row, 137.0) == (
        "time 2:17  round 4/12  step 390 (37 s ago)  loss 2.124 (37 s ago)  samples/s 116.1 (37 s ago)  "
        "pipelines 0  peers 4  stopped: stage 1 has no server for 35 s"
    )
    row.update({"replicas/1": 1.0, "pipelines": 1.0}, {}, 138.0)
    row.update({"step": 391.0}, {"step": 139.0}, 139.0)
    assert row.state(139.0) == "training"


def test_stages_without_a_server_are_named_with_the_time_since_the_first_one_went() -> None:
    row = _row()
    row.update({"replicas/0": 0.0}, {}, 102.0)
    row.update({"replicas/1": 0.0}, {}, 110.0)
    assert row.state(402.0) == "stopped: stages 0 and 1 have no server for 5 min"


def test_before_the_first_step_a_run_starts_and_says_what_it_lacks() -> None:
    row = RunRow(12, 0.0)
    assert row.state(1.0) == "starting"
    row.update({"replicas/0": 0.0, "replicas/1": 1.0}, {}, 2.0)
    assert row.state(3.0) == "starting: stage 0 has no server yet"


def test_a_run_whose_servers_are_all_there_and_that_commits_no_step_says_for_how_long() -> None:
    assert _row().state(109.0) == "training"
    assert _row().state(112.0) == "no step for 12 s"
    assert _row(step_s=8.0).state(130.0) == "training", "steps may take long"
    assert _row(step_s=8.0).state(141.0) == "no step for 41 s"


@pytest.mark.parametrize("width", [120, 60])
def test_old_numbers_are_dim_on_a_terminal_or_carry_their_age(width: int) -> None:
    def shown(now_s: float) -> str:
        console = Console(width=width, force_terminal=True, color_system="standard", legacy_windows=False)
        with console.capture() as capture:
            console.print(screen(_row(), now_s, width))
        return capture.get()

    dim = re.compile(r"\x1b\[2m *116\.1")
    if width == 120:
        assert not dim.search(shown(101.0))
        assert dim.search(shown(104.0))
        assert "step, loss, samples/s: 4 s old" in shown(104.0)
    else:
        assert "samples/s 116.1 (4 s ago)" in " ".join(shown(104.0).split())
