"""What a run shows on the terminal: the live row of its numbers while it runs, a table of results at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.ending import incident_lines, next_lines
from shoal.cli.run_files import LOCAL_MARK
from shoal.cli.run_row import RunRow
from shoal.cli.watched_display import WatchedDisplay
from shoal.clock import Clock
from shoal.config import Config
from shoal.control.swarm_status import SwarmStatus

_RESULTS: tuple[tuple[str, str], ...] = (
    ("stages", "stages"),
    ("replicas", "replicas"),
    ("pipelines", "pipelines_max"),
    ("trainers", "trainers"),
    ("outer rounds", "outer_rounds"),
    ("samples", "samples"),
    ("duplicate samples", "duplicates"),
    ("missing samples", "missing"),
    ("samples cut off by the end", "unreached"),
    ("eval loss, first", "eval_loss_first"),
    ("eval loss, last", "eval_loss_last"),
    ("eval loss, baseline", "eval_loss_baseline"),
    ("samples/s", "samples_per_s"),
    ("seconds to first step", "seconds_to_first_step"),
    ("seconds in all", "seconds_total"),
    ("processes at most", "processes"),
    ("memory at most (PSS)", "peak_pss_bytes"),
    ("steps skipped", "steps_skipped"),
    ("steps lost", "steps_lost"),
    ("processes lost", "failovers"),
)

_TELLING = "stop", "no step", "these numbers"
"""How states begin of which the launcher knows more than the client."""
_BESIDE = "time", "peers", "baseline", "load cv"
"""What of the row the screen has not."""


class LiveView(WatchedDisplay):
    """The terminal's side of a run; use it as a context while the run lasts, then call `finish`."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        log_dir: Path,
        *,
        console: Console | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare.

        Args:
            config: gives the number of rounds.
            log_dir: shown first, and after each failure.
            console: standard output if None.
        """
        super().__init__(console=console, clock=clock)
        self._row = self.shown = RunRow(config.diloco.outer_steps, self._clock.now_s())
        self._config = config
        self._run_id = run_id
        self._log_dir = log_dir

    def __enter__(self) -> Self:
        self.say(f"run {self._run_id}, logs in {self._log_dir}")
        return super().__enter__()

    def update(self, status: Mapping[str, float], at_s: Mapping[str, float] | None = None) -> None:
        """Show newer numbers, by name as in `monitor.status.Status`, and when each came."""
        self._row.update(status, at_s or {}, self._clock.now_s())

    def outdated(self) -> None:
        """Nobody gathers numbers for the moment: those that are shown are old until `update`."""
        self._row.is_outdated = True

    def stopping(self, *, asked: bool) -> None:
        """Say that the processes of the run are ending, and where a user has asked for it that this was heard."""
        self._row.is_stopping = True
        if asked:
            self.notice("stopping; press Ctrl-C again to end at once")

    def finish(
        self,
        summary: Mapping[str, Any] | None,
        failure: str | None,
        path: Path | None,
        log_dir: Path,
        *,
        curves: Path | None = None,
        report: Path | None = None,
    ) -> None:
        """Show how the run ended.

        Args:
            summary: as in `summary.json`; None: the run did not get that far.
            failure: why it failed; None: it did not.
            path: of `summary.json`; None: it was not written.
            log_dir: named when something failed.
            curves: the picture of how the run has learned; None: there is none.
        """
        # A run that ended in its first round has no results: without a record, what was trained is gone.
        if summary is not None and summary.get("samples"):
            self._print(_results(summary))
        elif summary is not None and failure is None:
            self.say("no round was completed, so nothing was trained for good")
        for line in () if summary is None else incident_lines(summary):
            self.say(line)
        if summary is not None and summary.get("model"):
            self.say(f"model: {summary['model']}")
        if curves is not None:
            self.say(f"curves: {curves}")
        if report is not None:
            self.say(f"report: {report}")
        if path is not None:
            self.say(f"summary: {path}")
        if failure is not None:
            self._print(Text(f"failed: {failure}", style="bold red"))
            self.say(f"the logs of all roles are in {log_dir}")
        is_local = (log_dir / LOCAL_MARK).exists()
        left = self._checkpoints(summary)
        for line in next_lines(self._config, summary, failure, log_dir, is_local=is_local, checkpoints=left):
            self.say(line)

    def _checkpoints(self, summary: Mapping[str, Any] | None) -> str | None:
        """Return where the run's checkpoints lie, if there is one."""
        if summary is None or "run_id" not in summary or not self._config.param_mirror.enable:
            return None
        place = f"{self._config.checkpoint_location}/{summary['run_id']}"
        return place if "://" in place or any(Path(place).glob("round_*")) else None

    def _state_of(self, status: SwarmStatus) -> str:
        state = self._row.state(self._clock.now_s())
        return state if state.startswith(_TELLING) else status.state

    def _beside(self) -> RenderableType:
        cells = self._row.cells(self._clock.now_s())
        beside = "  ".join(f"{cell.title} {cell.text}" for cell in cells if cell.title in _BESIDE)
        return Text(beside, no_wrap=True, overflow="ellipsis")


def _results(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for title, key in _RESULTS:
        value = _shown(key, summary.get(key))
        if value is not None:
            table.add_row(title, _written(key, value))
    return table


def _shown(key: str, value: object) -> object:
    """Of what went wrong, by stage or one by one, only the number, and only if something did."""
    match value:
        case 0 if key in ("steps_skipped", "unreached"):
            return None
        case dict():
            counts = cast("dict[str, int]", value)
            return sum(counts.values()) or None
        case list():
            return len(cast("list[object]", value)) or None
        case _:
            return value


def _written(key: str, value: object) -> str:
    match value:
        case int() if key.endswith("_bytes"):
            return f"{value / 2**20:,.0f} MiB"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
        case _:
            return str(value)
