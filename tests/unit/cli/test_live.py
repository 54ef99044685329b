"""The terminal view: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from shoal.cli.live import PLAIN_INTERVAL_S, LiveView
from shoal.clock import SystemClock
from shoal.config import load_config

STATUS = {
    "round": 2.0,
    "step": 40.0,
    "loss/train": 3.14159,
    "loss/eval": 3.5,
    "samples_per_s": 1234.56,
    "pipelines": 2.0,
    "alive_peers": 6.0,
    "missing_stages": 0.0,
}


class _Clock(SystemClock):
    """Monotonic time that a test moves."""

    now = 100.0

    def now_s(self) -> float:
        return self.now


class _Screen:
    def __init__(self, *, terminal: bool, width: int = 160) -> None:
        self.clock = _Clock()
        self._file = io.StringIO()
        console = Console(file=self._file, force_terminal=terminal, width=width, color_system=None)
        self.view = LiveView(load_config(), "test-run", Path("/logs/test-run"), console=console, clock=self.clock)

    @property
    def text(self) -> str:
        return self._file.getvalue()


class _FullDisk(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_where_there_is_no_terminal_plain_lines_come_every_few_seconds() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        for _ in range(20):
            view.update(STATUS)
            screen.clock.now += PLAIN_INTERVAL_S / 10
    lines = screen.text.splitlines()
    assert lines[0] == "run test-run, logs in /logs/test-run"
    rounds = load_config().diloco.outer_steps
    assert lines[1:] == [
        f"time 0:{second:02d}  round 2/{rounds}  step 40  loss 3.142  eval loss 3.500  samples/s 1,234.6  pipelines 2  "
        "peers 6  training"
        for second in (0, 5)
    ]
    assert "\x1b" not in screen.text


def test_on_a_terminal_the_numbers_stand_in_a_table() -> None:
    screen = _Screen(terminal=True)
    with screen.view as view:
        view.update(STATUS | {"loss/baseline": 2.5})
    for expected in ("eval loss", "3.142", "1,234.6", "baseline", "2.500", "training"):
        assert expected in screen.text


def test_the_table_with_a_baseline_fits_into_80_columns() -> None:
    screen = _Screen(terminal=True, width=80)
    with screen.view as view:
        view.update(STATUS | {"round": 10.0, "step": 1440.0, "loss/baseline": 2.5})
    for expected in ("time", "round", "eval loss", "baseline", "samples/s", "pipelines", "peers", "1,440", "2.500"):
        assert expected in screen.text
    assert "…" not in screen.text


def test_on_a_terminal_too_narrow_for_the_table_nothing_is_cut() -> None:
    screen = _Screen(terminal=True, width=50)
    with screen.view as view:
        view.update(STATUS)
    assert "…" not in screen.text
    assert "eval loss 3.500 samples/s 1,234.6 pipelines 2 peers 6 training" in " ".join(screen.text.split())


@pytest.mark.parametrize("interrupted", [True, False])
def test_only_ctrl_c_is_confirmed_and_a_swarm_that_ends_lacks_no_servers(interrupted: bool) -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.stopping(interrupted=interrupted)
        view.update({"missing_stages": 1.0})
    assert ("stopping; press Ctrl-C again to end at once" in screen.text) == interrupted
    assert screen.text.endswith("stopping\n")


@pytest.mark.parametrize(("missing", "text"), [(1.0, "1 stage without a server"), (2.0, "2 stages without a server")])
def test_missing_stages_are_said(missing: float, text: str) -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.update({"missing_stages": missing})
    assert screen.text.splitlines()[-1].endswith(text)


def test_a_notice_is_shown_as_it_is() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.notice("wandb: offline; to upload this run: wandb sync [bold]/x[/bold] " + "y" * 200)
    assert screen.text.splitlines()[-1].endswith("[bold]/x[/bold] " + "y" * 200)


def test_a_log_directory_is_shown_as_it_is() -> None:
    file = io.StringIO()
    with LiveView(load_config(), "test-run", Path("/logs/[bold]x"), console=Console(file=file, width=20)):
        assert file.getvalue() == "run test-run, logs in /logs/[bold]x\n"


def test_a_run_goes_on_when_nobody_takes_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[bool] = []
    monkeypatch.setattr("shoal.cli.live.discard_stdout", lambda: discarded.append(True))
    with LiveView(load_config(), "test-run", Path("/logs"), console=Console(file=_FullDisk())) as view:
        view.update(STATUS)
        view.notice("a notice")
    view.finish({"samples": 1}, "a failure", None, Path("/logs"))
    assert discarded == [True]


def test_the_end_shows_results_and_where_the_summary_is() -> None:
    screen = _Screen(terminal=False)
    summary = {"samples": 12345, "eval_loss_last": 2.1, "peak_pss_bytes": 3 * 2**20, "duplicates": 0, "steps_lost": {}}
    summary["model"] = "/logs/test-run/model"
    screen.view.finish(summary, None, Path("/logs/test-run/summary.json"), Path("/logs/test-run"))
    assert [line.split() for line in screen.text.splitlines()] == [
        ["samples", "12,345"],
        ["duplicate", "samples", "0"],
        ["eval", "loss,", "last", "2.100"],
        ["memory", "at", "most", "(PSS)", "3", "MiB"],
        ["model:", "/logs/test-run/model"],
        ["summary:", "/logs/test-run/summary.json"],
    ]


def test_losses_are_shown_as_numbers_and_only_if_there_were_any() -> None:
    screen = _Screen(terminal=False)
    summary = {"samples": 1, "steps_skipped": 0, "unreached": 0, "steps_lost": {"0": 0, "1": 0}, "failovers": []}
    screen.view.finish(summary, None, None, Path("/logs/test-run"))
    assert screen.text.split() == ["samples", "1"]
    screen = _Screen(terminal=False)
    summary = {"samples": 1, "steps_skipped": 2, "steps_lost": {"0": 0, "1": 3}, "failovers": [{"kind": "server"}]}
    screen.view.finish(summary, None, None, Path("/logs/test-run"))
    assert screen.text.split() == [
        *("samples", "1", "steps", "skipped", "2", "steps", "lost", "3", "processes", "lost", "1")
    ]


def test_a_run_that_failed_before_its_first_step_shows_no_results() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish({"samples": 0}, "no", Path("/logs/test-run/summary.json"), Path("/logs/test-run"))
    assert screen.text.splitlines() == [
        "summary: /logs/test-run/summary.json",
        "failed: no",
        "the logs of all roles are in /logs/test-run",
    ]


def test_a_failure_names_the_reason_and_the_logs() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish(None, "server 1 ended early: killed by SIGKILL", None, Path("/logs/test-run"))
    assert screen.text.splitlines() == [
        "failed: server 1 ended early: killed by SIGKILL",
        "the logs of all roles are in /logs/test-run",
    ]


def test_numbers_are_said_to_be_old_while_the_monitor_is_started_again() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.update(STATUS)
        view.outdated()
        assert "these numbers are old" in view._line()
        view.update(STATUS)
        assert "these numbers are old" not in view._line()


def test_a_run_that_is_interrupted_in_its_first_round_has_no_results() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish(
        {"samples": 0, "outer_rounds": 0, "eval_loss_first": 5.0, "eval_loss_last": None}, None, None, Path("/logs")
    )
    assert "no round was completed" in screen.text
    assert "eval loss" not in screen.text
