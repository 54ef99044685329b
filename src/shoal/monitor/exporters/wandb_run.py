"""One Weights & Biases run, fed by a thread of its own, so that neither its import nor the network delays anybody.

Without an account or without a network the run is written to disk, and one notice says so. Without the package, or
where it fails altogether, there is no run, and the notice says that.

A monitor that is started again goes on with the same W&B run: under the same id, in the row after the last one. W&B
appends to nothing that was written offline, so there each start leaves a folder of its own, and they fit together.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from shoal.events.base import field_names, name_of, tell
from shoal.events.incidents import IncidentClosed
from shoal.events.monitor import WandbMissing, WandbOffline, WandbOnline, WandbStopped
from shoal.monitor.exporters.base import FedThread, NotedEvent
from shoal.telemetry.rows import MetricRow

logger = logging.getLogger(__name__)

_INIT_TIMEOUT_S = 15.0
_MAX_QUEUED = 10_000
_MAX_TOLD = 2000
_OF_INCIDENT = tuple(field_names(IncidentClosed).values())
_ROWS_FILE, _ROW_DIGITS = "wandb.rows", 12


@dataclass(frozen=True)
class WandbSettings:
    """Which run to log to.

    Attributes:
        name: the run's name in W&B.
        directory: existing folder in which W&B makes its `wandb` folder.
        config: shown with the run; no secrets.
        run_id: the same at every start.
        is_offline: W&B is asked for nothing; otherwise it goes online if it can.
        project, entity: None leaves the choice to W&B.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    run_id: str
    project: str | None = None
    entity: str | None = None
    is_offline: bool = False


class Rows:
    """The numbers of a run's rows: each is given once, over all starts of the monitor."""

    def __init__(self, file: int, first: int) -> None:
        """Go on after the last number in this file, and from `first` on at least: W&B may have rows of other hosts."""
        self._file = file
        kept = os.pread(file, _ROW_DIGITS, 0)
        # A loss of power may have left what is no number.
        self._next = max(first, int(kept) if kept.isdigit() else 0)

    def next(self) -> int:
        """Return the number of the next row."""
        row, self._next = self._next, self._next + 1
        # First: a process that is killed in between leaves a gap, which W&B takes; what repeats it drops.
        os.pwrite(self._file, b"%0*d" % (_ROW_DIGITS, self._next), 0)
        return row


@contextmanager
def open_rows(directory: Path, first: int) -> Generator[Rows]:
    """Give the numbers of the rows of the run whose logs are in this directory; see `Rows`.

    Raises:
        OSError: they cannot be kept there.
    """
    file = os.open(directory / _ROWS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield Rows(file, first)
    finally:
        os.close(file)


@contextmanager
def _temporary_files_in(directory: Path) -> Generator[None]:
    """Have W&B make its temporary files there, and remove them.

    It removes them itself when its interpreter ends, which that of a role never does: it is left by `os._exit`.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="wandb-", dir=directory, ignore_cleanup_errors=True) as scratch:
        tempfile.tempdir = scratch
        try:
            yield
        finally:
            tempfile.tempdir = before


class WandbRun:
    """An exporter for W&B. The run is made with the first numbers."""

    def __init__(self, settings: WandbSettings, notice: Callable[[str], None]) -> None:
        """Prepare; nothing is imported yet.

        Args:
            notice: called from the thread with one line for the user.
        """
        self._settings = settings
        self._notice = notice
        self._thread = FedThread[Mapping[str, float]]("wandb", self.write, _MAX_QUEUED)
        self._peers: dict[str, float] = {}
        self._newest: dict[str, dict[str, float]] = {}
        self._told: list[tuple[str, ...]] = []
        self._incidents: list[tuple[object, ...]] = []

    def row(self, row: MetricRow) -> None:
        """Add the numbers of a second; dropped where W&B cannot keep up or does not run."""
        if values := self.values_of(row):
            self._thread.put(values)

    def values_of(self, row: MetricRow) -> Mapping[str, float]:
        """Return what W&B gets of a row, in the order of rows; nothing if it has no number of the run.

        Numbers of peers go with the next ones of the run: curves are over its samples, which a peer does not know.
        """
        self._peers |= MetricRow(row.time, {}, row.peers).flat()
        for peer, values in row.peers.items():
            self._newest[peer] = self._newest.get(peer, {}) | values
        if not row.run:
            return {}
        values, self._peers = row.run | self._peers, {}
        return values

    def event(self, event: NotedEvent) -> None:
        """Keep what a person is told, and what went wrong: tables are made of it when the run is finished."""
        if event.says and len(self._told) < _MAX_TOLD:
            self._told.append((event.time, event.level, event.event, event.says))
        if event.event == name_of(IncidentClosed) and len(self._incidents) < _MAX_TOLD:
            fields: dict[str, object] = msgspec.json.decode(event.line)
            self._incidents.append((event.time, *(fields.get(name) for name in _OF_INCIDENT)))

    def close(self, timeout_s: float) -> bool:
        """Finish the run; blocks for at most `timeout_s` seconds. Returns whether it finished."""
        return self._thread.close(timeout_s)

    def write(self, rows: Iterable[Mapping[str, float]]) -> bool:
        """Make the run of these rows, in this thread; a line for the user says what does not work.

        Returns:
            Whether W&B has taken them all.
        """
        # W&B reports its own errors to its makers unless it is told not to; this is a process of its own.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError:
            tell(logger, WandbMissing(), self._notice)
            return False
        api = cast(Any, wandb)
        try:
            with _temporary_files_in(self._settings.directory):
                self._write(api, rows)
        except Exception as error:  # noqa: BLE001 - of its own process that was killed it says a dozen things
            tell(logger, WandbStopped(_first_line(error)), self._notice)
            return False
        return True

    def _write(self, api: Any, rows: Iterable[Mapping[str, float]]) -> None:
        run = self._start(api)
        with open_rows(self._settings.directory, first=int(run.step)) as numbers:
            for values in rows:
                run.log(dict(values), step=numbers.next())
            tables = {name: api.Table(columns=columns, data=data) for name, columns, data in self._tables()}
            if tables:
                run.log(tables, step=numbers.next())
        run.finish()
        api.teardown()

    def _tables(self) -> Iterator[tuple[str, list[str], Sequence[Sequence[object]]]]:
        """Yield name, columns and rows of what is told once, at the end."""
        if self._told:
            yield "events", ["time", "level", "event", "says"], self._told
        if self._incidents:
            yield "incidents", ["time", *_OF_INCIDENT], self._incidents
        if self._newest:
            columns = sorted({name for values in self._newest.values() for name in values})
            peers = sorted(self._newest.items())
            yield "peers", ["peer", *columns], [[who, *map(values.get, columns)] for who, values in peers]

    def _start(self, api: Any) -> Any:
        reason = None
        try:
            run = self._init(api, "offline" if self._settings.is_offline else None)
        except (api.errors.UsageError, api.errors.CommError) as error:
            reason = str(error)
            run = self._init(api, "offline")
        # Curves over samples can be compared between runs of any batch size and with the baseline.
        run.define_metric("*", step_metric="samples")
        if run.settings.mode == "offline":
            parts = Path(run.settings.sync_dir).parent / f"offline-run-*-{self._settings.run_id}"
            tell(logger, WandbOffline(str(parts), reason), self._notice)
        elif run.settings.mode == "online":
            tell(logger, WandbOnline(str(run.url)), self._notice)
        return run

    def _init(self, api: Any, mode: str | None) -> Any:
        """Make the run; `mode` None lets W&B's own environment variables decide, and it goes online otherwise."""
        wanted = self._settings
        return api.init(
            project=wanted.project,
            entity=wanted.entity,
            id=wanted.run_id,
            resume="allow" if mode is None else None,
            name=wanted.name,
            dir=str(wanted.directory),
            config=dict(wanted.config),
            mode=mode,
            settings=api.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                init_timeout=_INIT_TIMEOUT_S,
                x_disable_meta=True,
                x_disable_stats=True,
            ),
        )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
