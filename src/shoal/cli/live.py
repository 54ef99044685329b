"""What a run shows on the terminal: the live row of its numbers while it runs, at the end a table of results, what was
lost on the way, and what can be done next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.afterwards import left_commands, next_lines
from shoal.cli.display import Display
from shoal.cli.output import without_controls
from shoal.cli.run_row import RunRow, duration
from shoal.clock import Clock
from shoal.config import Config
from shoal.control.swarm_status import SwarmStatus
from shoal.events.incidents import Cause

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
_SHOWN = 5


class LiveView(Display):
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

    def starting(self, doing: str) -> None:
        """Show what is done before the first round can begin, and how far it is; empty: that is over."""
        self._row.doing = doing

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
            curves: the picture of how the run has learned; None: there is none.
        """
        # A run that ended in its first round has no results: without a record, what was trained is gone.
        if summary is not None and summary.get("samples"):
            self._print(_results(summary, self._config.diloco.outer_steps))
        elif summary is not None and failure is None:
            self.say("no round was completed, so nothing was trained for good")
        elif failure is None:
            self.say("ended before its client had said what was reached; what is recorded stays")
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
            self.failed(failure)
            self.say(f"the logs of all roles are in {log_dir}")
        run_id = str((summary or {}).get("run_id", self._run_id))
        for line in next_lines(left_commands(self._config, run_id, log_dir, summary, failure)):
            self.say(line)

    def failed(self, failure: str | None) -> None:
        """Say why the run has failed."""
        self._print(Text(without_controls(f"failed: {failure}"), style="bold red"))

    def _state_of(self, status: SwarmStatus) -> str:
        state = self._row.state(self._clock.now_s())
        return state if state.startswith(_TELLING) else status.state

    def _beside(self) -> RenderableType:
        cells = self._row.cells(self._clock.now_s())
        beside = "  ".join(f"{cell.title} {cell.text}" for cell in cells if cell.title in _BESIDE)
        return Text(beside, no_wrap=True, overflow="ellipsis")


def _results(summary: Mapping[str, Any], num_rounds: int) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for title, key in _RESULTS:
        value = _shown(key, summary.get(key))
        if value is not None:
            of = f" of {num_rounds:,}" if key == "outer_rounds" and value != num_rounds else ""
            table.add_row(title, _written(key, value) + of)
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


def incident_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each of the last incidents in `summary.json`, and how many there were before."""
    incidents: list[dict[str, Any]] = summary.get("incidents") or []
    if len(incidents) > _SHOWN:
        yield f"{len(incidents)} incidents on the way; the last of them:"
    for incident in incidents[-_SHOWN:]:
        yield _sentence(incident)


def _sentence(incident: Mapping[str, Any]) -> str:
    stage = "" if incident["stage"] is None else f" (stage {incident['stage']})"
    when = f"in round {incident['round']}, {duration(incident['at_s'])} after launch"
    recovered_s, back_s, lost = incident["recovered_after_s"], incident["back_after_s"], incident["steps_lost"]
    cause, at_end = incident["cause"], "it was not over at the end"
    if cause == Cause.LEFT and back_s is None:
        cause, at_end = "wanted to leave", "still there at the end"
    parts = [f"{incident['who']}{stage}: {cause} {when}"]
    if recovered_s is not None:
        parts.append(f"training went on after {recovered_s:.1f} s")
    parts.append(at_end if back_s is None else f"over after {back_s:.1f} s")
    if lost:
        parts.append(f"{lost} step{'s'[: lost != 1]} lost")
    return "; ".join(parts)
