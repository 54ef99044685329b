"""What a run shows on the terminal: the live row of its numbers while it runs, at the end a table of results, what was
lost on the way, and what can be done next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.checkpoint.places import LocalPlace, folder_of, round_of
from shoal.cli.display import Display
from shoal.cli.output import without_controls
from shoal.cli.run_files import LOCAL_MARK
from shoal.cli.run_row import RunRow, duration
from shoal.clock import Clock
from shoal.config import Config
from shoal.config.named_code import naming_options, own_family
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
_GENERATES = ("gpt", "hf")
"""Families whose models go on from a text; one of the user's own may, and is not known to."""


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
            self.failed(failure)
            self.say(f"the logs of all roles are in {log_dir}")
        is_local = (log_dir / LOCAL_MARK).exists()
        left = checkpoints_left(self._config, str((summary or {}).get("run_id", "")))
        for line in next_lines(self._config, summary, failure, log_dir, is_local=is_local, checkpoints=left):
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


def checkpoints_left(config: Config, run_id: str) -> str | None:
    """Return where the checkpoints of a run lie; None: it has left none, or nobody knows what it is called."""
    if not run_id or not config.param_mirror.enable:
        return None
    place = f"{config.checkpoint_location}/{run_id}"
    return place if "://" in place or _newest(place) is not None else None


def next_lines(
    config: Config,
    summary: Mapping[str, Any] | None,
    failure: str | None,
    log_dir: Path,
    *,
    is_local: bool,
    checkpoints: str | None = None,
) -> Iterator[str]:
    """Yield commands that say more of a run, use what it has trained, or go on with it.

    Args:
        is_local: what its servers have logged is here, and not on other hosts.
        checkpoints: where those of this run lie; None: it has left none.
    """
    title = "next: "
    for command in _commands(config, summary or {}, failure, str(log_dir), checkpoints, is_local=is_local):
        yield title + shlex.join(("shoal", *command))
        title = " " * len(title)


def _commands(
    config: Config,
    summary: Mapping[str, Any],
    failure: str | None,
    log_dir: str,
    checkpoints: str | None,
    *,
    is_local: bool,
) -> Iterator[tuple[str, ...]]:
    model = summary.get("model")
    if model and summary.get("samples"):
        if config.data.messages_column is not None and config.model.family in _GENERATES:
            yield "chat", str(model)
        elif config.data.task_type == "llm" and config.model.family in _GENERATES:
            yield "generate", str(model), "--prompt", "Once upon a time"
        elif config.data.task_type == "image_gen":
            yield "images", str(model), "--to", "images.png"
        else:
            yield "evaluate", str(model), *naming_options(config)
    elif checkpoints is not None and summary.get("exit") == "done" and (newest := _newest(checkpoints)) is not None:
        family = own_family(config)
        yield "export", newest, "--to", "model", *(() if family is None else ("--family", family))
    if checkpoints is not None and summary.get("exit") == "interrupted":
        yield "run-local" if is_local else "start-trainer-client", "--resume", checkpoints
    if summary.get("samples") and is_local:
        yield "replay", log_dir, *naming_options(config)
    if failure is not None:
        yield "logs", log_dir, "--level", "warning"
    if summary:
        yield "events", log_dir


def _newest(checkpoints: str) -> str | None:
    """Return the newest checkpoint of a folder of this host; None: there is none."""
    if "://" in checkpoints:
        return None
    with suppress(OSError):
        rounds = [round for name in LocalPlace(Path(checkpoints)).folders() if (round := round_of(name)) is not None]
        return f"{checkpoints}/{folder_of(max(rounds))}" if rounds else None
    return None
