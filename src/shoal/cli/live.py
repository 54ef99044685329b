"""What a run shows on the terminal: one live table while it runs, a table of results at the end.

Where standard output is not a terminal (a file, a pipe, a build log) the same numbers come as one plain line every few
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.output import discard_stdout
from shoal.clock import Clock, SystemClock
from shoal.config import Config

PLAIN_INTERVAL_S = 5.0
_REFRESH_PER_S = 4.0
_GAP = 2


class _Output(Console):
    """Standard output. A run does not end because nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `LiveView` handles; what is inherited here ends the process."""
        raise BrokenPipeError


_Number = Callable[[float], str]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _loss(value: float) -> str:
    return f"{value:.3f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


# Title, the name of the number (see monitor.status.Status), how it is written.
_COLUMNS: tuple[tuple[str, str, _Number], ...] = (
    ("step", "step", _whole),
    ("loss", "loss/train", _loss),
    ("eval loss", "loss/eval", _loss),
    ("baseline", "loss/baseline", _loss),
    ("samples/s", "samples_per_s", _rate),
    ("pipelines", "pipelines", _whole),
    ("peers", "alive_peers", _whole),
)
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


class LiveView:
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
            config: says how many rounds there will be.
            run_id: shown first.
            log_dir: shown first, and wherever something fails.
            console: where to write; by default standard output.
            clock: for the elapsed time.
        """
        self._num_rounds = config.diloco.outer_steps
        self._run_id = run_id
        self._log_dir = log_dir
        self._console = console or _Output()
        self._clock = clock or SystemClock()
        self._started_s = self._clock.now_s()
        self._last_line_s = self._started_s - PLAIN_INTERVAL_S
        self._status: Mapping[str, float] = {}
        self._phase = "starting"
        self._is_outdated = False
        self._live: Live | None = None

    def __enter__(self) -> Self:
        self._say(f"run {self._run_id}, logs in {self._log_dir}")
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._screen,
                console=self._console,
                refresh_per_second=_REFRESH_PER_S,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, status: Mapping[str, float]) -> None:
        """Show newer numbers, by name as in `monitor.status.Status`."""
        self._status = status
        self._is_outdated = False
        if self._phase == "starting" and "loss/train" in status:
            self._phase = "training"
        now_s = self._clock.now_s()
        if not self._console.is_terminal and now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self._say(self._line())

    def outdated(self) -> None:
        """Nobody gathers numbers for the moment: those that are shown are old until `update`."""
        self._is_outdated = True

    def notice(self, text: str) -> None:
        """Show one line that stays."""
        self._say(text)

    def stopping(self, *, interrupted: bool) -> None:
        """Say that the processes of the run are ending, and after a Ctrl-C that it was heard."""
        self._phase = "stopping"
        if interrupted:
            self._say("stopping; press Ctrl-C again to end at once")

    def finish(self, summary: Mapping[str, Any] | None, failure: str | None, path: Path | None, log_dir: Path) -> None:
        """Show how the run ended.

        Args:
            summary: as in `summary.json`; None if the run did not get so far.
            failure: why it failed, or None.
            path: of `summary.json`, if it was written.
            log_dir: where to look when something failed.
        """
        # A run that ended in its first round has no results: without a record, what was trained is gone.
        if summary is not None and summary.get("samples"):
            self._print(_results(summary))
        elif summary is not None and failure is None:
            self._say("no round was completed, so nothing was trained for good")
        if summary is not None and summary.get("model"):
            self._say(f"model: {summary['model']}")
        if path is not None:
            self._say(f"summary: {path}")
        if failure is not None:
            self._print(Text(f"failed: {failure}", style="bold red"))
            self._say(f"the logs of all roles are in {log_dir}")

    def _say(self, text: str) -> None:
        # Text from outside must not be read as rich's markup.
        self._print(Text(text))

    def _print(self, what: RenderableType) -> None:
        """Print; not cut at the width of a pipe, and nothing more once nobody takes it (`| head`, a full disk)."""
        try:
            self._console.print(what, highlight=False, soft_wrap=True)
        except OSError:
            self._console.quiet = True
            discard_stdout()

    def _screen(self) -> Group:
        """The numbers as a table and the phase under it; as wrapped text where the terminal is too narrow for that."""
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for title, _ in self._cells():
            table.add_column(title, justify="right", no_wrap=True)
        table.add_row(*(value for _, value in self._cells()))
        fits = sum(max(map(len, cell)) + _GAP for cell in self._cells()) - _GAP <= self._console.width
        return Group(table if fits else Text(self._numbers()), Text(self._state(), style="dim"))

    def _line(self) -> str:
        return "  ".join(filter(None, (self._numbers(), self._state())))

    def _numbers(self) -> str:
        return "  ".join(f"{title} {value}" for title, value in self._cells() if value != "-")

    def _state(self) -> str:
        missing = int(self._status.get("missing_stages", 0))
        if missing and self._phase != "stopping":
            return f"{self._phase}: {missing} stage{'s'[: missing != 1]} without a server"
        if self._is_outdated and self._phase != "stopping":
            return f"{self._phase}: these numbers are old, the monitor is started again"
        return self._phase

    def _cells(self) -> list[tuple[str, str]]:
        """Return title and text of each column."""
        elapsed_s = int(self._clock.now_s() - self._started_s)
        current = self._status.get("round")
        cells = [
            ("time", f"{elapsed_s // 60}:{elapsed_s % 60:02d}"),
            ("round", "-" if current is None else f"{min(int(current), self._num_rounds)}/{self._num_rounds}"),
        ]
        for title, name, write in _COLUMNS:
            value = self._status.get(name)
            if value is not None or title != "baseline":
                cells.append((title, "-" if value is None else write(value)))
        return cells


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
