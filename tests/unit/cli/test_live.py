"""The terminal view: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import io
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.cli.screen.test_layout import TRAINING

from shoal.cli.display import PLAIN_INTERVAL_S
from shoal.cli.live import LiveView
from shoal.cli.run_folder import LOCAL_MARK
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
    """Time that a test moves, or whoever sleeps; after a number of sleeps time stands still."""

    now = 100.0
    sleeps = 0

    def now_s(self) -> float:
        return self.now

    def unix_s(self) -> float:
        return 7 * 3600 + self.now

    async def sleep_s(self, duration_s: float) -> None:
        if not self.sleeps:
            raise _Enough
        self.sleeps -= 1
        self.now += duration_s


class _Enough(Exception):
    """Time stands still."""


class _Screen:
    def __init__(self, *, terminal: bool, width: int = 160, height: int = 25) -> None:
        self.clock = _Clock()
        self._file = io.StringIO()
        console = Console(file=self._file, force_terminal=terminal, width=width, height=height, color_system=None)
        self.view = LiveView(load_config(), "test-run", Path("/logs/test-run"), console=console, clock=self.clock)

    @property
    def text(self) -> str:
        return self._file.getvalue()

    async def wait(self, num_intervals: int = 1) -> None:
        """Let time pass in which nothing happens."""
        self.clock.sleeps = num_intervals
        with pytest.raises(_Enough):
            await self.view.run()


class _Held(io.StringIO):
    """A terminal that takes nothing until it is let go (Ctrl-S, Ctrl-Q)."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str, /) -> int:
        self.let_go.wait()
        return super().write(text)


class _Terminal(io.StringIO):
    is_gone = False

    def write(self, text: str, /) -> int:
        if self.is_gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


class _FullDisk(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_where_there_is_no_terminal_a_line_comes_every_few_seconds_even_if_nothing_changes() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        await screen.wait()
        view.update(STATUS, dict.fromkeys(STATUS, screen.clock.now + PLAIN_INTERVAL_S))
        await screen.wait(2)
    lines = screen.text.splitlines()
    assert lines[0] == "run test-run, logs in /logs/test-run"
    rounds = load_config().diloco.outer_steps
    assert lines[1:] == [
        "07:01:45Z  time 0:05  starting",
        f"07:01:50Z  time 0:10  round 2/{rounds}  step 40  loss 3.142  eval loss 3.500  samples/s 1,234.6  "
        "pipelines 2  peers 6  training",
        f"07:01:55Z  time 0:15  round 2/{rounds}  step 40 (5 s ago)  loss 3.142 (5 s ago)  eval loss 3.500  "
        "samples/s 1,234.6 (5 s ago)  pipelines 2  peers 6  training",
    ]
    assert "\x1b" not in screen.text


async def test_a_terminal_that_cannot_write_over_a_row_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = _Screen(terminal=True)
    with screen.view:
        await screen.wait()
    assert screen.text.splitlines()[1:] == ["07:01:45Z  time 0:05  starting"]


def test_what_happens_is_shown_at_once_with_the_time_of_day_and_what_is_to_be_copied_without() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.notice("server 1 has ended")
        view.say("export INITIAL_PEERS=x")
    assert screen.text.splitlines()[1:] == ["07:01:40Z  server 1 has ended", "export INITIAL_PEERS=x"]


def test_on_a_terminal_the_numbers_stand_in_a_table() -> None:
    screen = _Screen(terminal=True)
    with screen.view as view:
        view.update(STATUS | {"loss/baseline": 2.5})
    for expected in ("eval loss", "3.142", "1,234.6", "baseline", "2.500", "training"):
        assert expected in screen.text


def test_a_terminal_that_is_large_enough_shows_stages_with_their_servers_and_the_launchers_word_on_the_state() -> None:
    screen = _Screen(terminal=True, width=80, height=24)
    with screen.view as view:
        view.update(STATUS | {"loss/baseline": 2.5}, dict.fromkeys(STATUS, screen.clock.now))
        view.watch(lambda: TRAINING)
        screen.clock.now += 5.0
    assert "stage 0  server 0@alpha" in screen.text
    assert "training round 7 of 9" in screen.text
    assert "time 0:05  baseline 2.500  peers 6" in screen.text
    assert "is silent for 3 s" not in screen.text, "events stay above"
    screen = _Screen(terminal=True, width=80, height=24)
    with screen.view as view:
        view.watch(lambda: TRAINING)
        view.stopping(asked=False)
    assert "stopping" in screen.text
    assert "training round" not in screen.text


@pytest.mark.parametrize(("width", "height"), [(59, 24), (80, 14)])
def test_a_terminal_that_is_too_small_has_the_row(width: int, height: int) -> None:
    screen = _Screen(terminal=True, width=width, height=height)
    with screen.view as view:
        view.update(STATUS)
        view.watch(lambda: TRAINING)
    assert "stage 0" not in screen.text


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
async def test_only_ctrl_c_is_confirmed_and_a_swarm_that_ends_lacks_no_servers(interrupted: bool) -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.stopping(asked=interrupted)
        view.update({"replicas/0": 0.0})
        await screen.wait()
    assert ("stopping; press Ctrl-C again to end at once" in screen.text) == interrupted
    assert screen.text.endswith("stopping\n")


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
    monkeypatch.setattr("shoal.cli.display.discard_stdout", lambda: discarded.append(True))
    with LiveView(load_config(), "test-run", Path("/logs"), console=Console(file=_FullDisk())) as view:
        view.update(STATUS)
        view.notice("a notice")
    view.finish({"samples": 1}, "a failure", None, Path("/logs"))
    assert discarded == [True]


def test_a_run_that_outlives_its_terminal_is_summed_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[bool] = []
    monkeypatch.setattr("shoal.cli.display.discard_stdout", lambda: discarded.append(True))
    terminal = _Terminal()
    console = Console(file=terminal, force_terminal=True, color_system=None)
    with LiveView(load_config(), "test-run", Path("/logs"), console=console) as view:
        view.update(STATUS)
        assert view.is_screen
        terminal.is_gone = True
    view.finish({"samples": 1}, "a failure", None, Path("/logs"))
    assert discarded == [True]


def test_the_end_shows_results_and_where_the_summary_is(tmp_path: Path) -> None:
    (tmp_path / LOCAL_MARK).touch()
    screen = _Screen(terminal=False)
    summary = {"samples": 12345, "eval_loss_last": 2.1, "peak_pss_bytes": 3 * 2**20, "duplicates": 0, "steps_lost": {}}
    summary["model"] = "/logs/test-run/model"
    screen.view.finish(summary, None, Path("/logs/test-run/summary.json"), tmp_path)
    assert [line.split() for line in screen.text.splitlines()] == [
        ["samples", "12,345"],
        ["duplicate", "samples", "0"],
        ["eval", "loss,", "last", "2.100"],
        ["memory", "at", "most", "(PSS)", "3", "MiB"],
        ["model:", "/logs/test-run/model"],
        ["summary:", "/logs/test-run/summary.json"],
        ["next:", "shoal", "generate", "/logs/test-run/model", "--prompt", "'Once", "upon", "a", "time'"],
        ["shoal", "replay", str(tmp_path)],
        ["shoal", "events", str(tmp_path)],
    ]


def test_of_a_run_that_has_ended_before_its_last_round_it_is_said_how_many_it_was_to_have() -> None:
    rounds = load_config().diloco.outer_steps
    for done, shown in ((2, f"outer rounds  2 of {rounds}"), (rounds, f"outer rounds  {rounds}")):
        screen = _Screen(terminal=False)
        screen.view.finish({"samples": 1, "outer_rounds": done}, None, None, Path("/logs/test-run"))
        assert shown.split() in [line.split() for line in screen.text.splitlines()]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_was_interrupted_says_how_it_goes_on_if_it_has_left_a_checkpoint(
    tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        (tmp_path / "run-1" / "round_000003").mkdir(parents=True)
    config = load_config(None, {"checkpoint_dir": str(tmp_path)}, {})
    text = io.StringIO()
    view = LiveView(config, "run-1", tmp_path, console=Console(file=text, width=160), clock=_Clock())
    view.finish({"samples": 0, "exit": "interrupted", "run_id": "run-1"}, None, None, tmp_path)
    line = f"shoal start-trainer-client --resume {tmp_path}/run-1"
    assert (line in text.getvalue().replace("\n", "")) == is_there


def test_the_checkpoint_to_export_is_that_of_the_highest_round_and_no_folder_beside_it(tmp_path: Path) -> None:
    for name in ("round_000009", "round_1000000", "round_999999", "round_999999.before", "round_zero", "round_5"):
        (tmp_path / "run-1" / name).mkdir(parents=True)
    config = load_config(None, {"checkpoint_dir": str(tmp_path)}, {})
    text = io.StringIO()
    view = LiveView(config, "run-1", tmp_path, console=Console(file=text, width=160), clock=_Clock())
    view.finish({"samples": 8, "exit": "done", "run_id": "run-1"}, None, None, tmp_path)
    assert f"shoal export {tmp_path}/run-1/round_1000000 --to model" in text.getvalue().replace("\n", " ")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_takes_nothing_keeps_no_run_and_shows_all_of_it_later(
    tmp_path: Path, is_terminal: bool
) -> None:
    held = _Held()
    console = Console(file=held, force_terminal=is_terminal, width=160, height=25, color_system=None)
    try:
        with LiveView(load_config(), "test-run", tmp_path, console=console, clock=_Clock()) as view:
            view.update(STATUS)
            for number in range(3):
                view.notice(f"event {number}")
        view.finish(None, "no stage 1", None, tmp_path)
        assert held.getvalue() == ""
    finally:
        held.let_go.set()
    view.notice("it goes on")
    view._out.end()
    said = held.getvalue()
    positions = [said.index(text) for text in ("event 0", "event 1", "event 2", "failed: no stage 1", "it goes on")]
    assert positions == sorted(positions)


def test_losses_are_shown_as_numbers_and_only_if_there_were_any() -> None:
    screen = _Screen(terminal=False)
    summary = {"samples": 1, "steps_skipped": 0, "unreached": 0, "steps_lost": {"0": 0, "1": 0}, "failovers": []}
    screen.view.finish(summary, None, None, Path("/logs/test-run"))
    assert screen.text.partition("next:")[0].split() == ["samples", "1"]
    screen = _Screen(terminal=False)
    summary = {"samples": 1, "steps_skipped": 2, "steps_lost": {"0": 0, "1": 3}, "failovers": [{"kind": "server"}]}
    screen.view.finish(summary, None, None, Path("/logs/test-run"))
    assert screen.text.partition("next:")[0].split() == [
        *("samples", "1", "steps", "skipped", "2", "steps", "lost", "3", "processes", "lost", "1")
    ]


def test_a_run_that_failed_before_its_first_step_shows_no_results() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish({"samples": 0}, "no", Path("/logs/test-run/summary.json"), Path("/logs/test-run"))
    assert screen.text.splitlines() == [
        "summary: /logs/test-run/summary.json",
        "failed: no",
        "the logs of all roles are in /logs/test-run",
        "next: shoal logs /logs/test-run --level warning",
        "      shoal events /logs/test-run",
    ]


def test_a_failure_names_the_reason_and_the_logs() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish(None, "server 1 ended early: killed by SIGKILL", None, Path("/logs/test-run"))
    assert screen.text.splitlines() == [
        "failed: server 1 ended early: killed by SIGKILL",
        "the logs of all roles are in /logs/test-run",
        "next: shoal logs /logs/test-run --level warning",
    ]


async def test_numbers_stand_and_are_said_to_be_old_while_the_monitor_is_started_again() -> None:
    screen = _Screen(terminal=False)
    with screen.view as view:
        view.update(STATUS)
        view.outdated()
        await screen.wait()
        assert "step 40" in screen.text
        assert "these numbers are old" in screen.text.splitlines()[-1]
        view.update({"alive_peers": 1.0})
        await screen.wait()
        assert "these numbers are old" not in screen.text.splitlines()[-1]
        assert "eval loss 3.500" in screen.text.splitlines()[-1], "a monitor that starts anew knows less"


def test_of_a_run_whose_client_was_ended_at_once_it_is_said_that_its_results_are_not_known() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish(None, None, Path("/logs/test-run/summary.json"), Path("/logs/test-run"))
    assert "ended before its client had said what was reached; what is recorded stays" in screen.text.splitlines()


def test_a_run_that_is_interrupted_in_its_first_round_has_no_results() -> None:
    screen = _Screen(terminal=False)
    screen.view.finish(
        {"samples": 0, "outer_rounds": 0, "eval_loss_first": 5.0, "eval_loss_last": None}, None, None, Path("/logs")
    )
    assert "no round was completed" in screen.text
    assert "eval loss" not in screen.text
