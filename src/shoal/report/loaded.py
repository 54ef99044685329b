"""`shoal.load_run`: what a run has left in its folder, for notebooks and scripts: its numbers as columns of numpy.

run = shoal.load_run("logs/sandbox")
samples, loss = run.curve("loss/train")
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.errors import MALFORMED, ConfigError
from shoal.events.base import SUMMARY_FILE
from shoal.ids import RunId
from shoal.monitor.exporters.base import read_noted
from shoal.monitor.exporters.metrics_file import read_rows
from shoal.report.curves import caption_of
from shoal.report.learning import read_learning
from shoal.report.plot import draw

TIME: Final = "time"
"""The column of when a row was made: Unix time, in seconds."""
_CONFIG = "config.yaml"

_MOST_COLUMNS = 4096

Column = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A run as its folder has it. A notebook draws it as `curves.svg` does.

    Attributes:
        folder: where it lies; its name is that of the run.
        config: what it was told.
        summary: how it has ended, as `summary.json` has it; empty of a run that goes on or was killed.
        numbers: of the run, a row a second: a column a number of docs/metrics.md, all equally long, NaN where a row has
            not that number; and `time`.
        peers: the same for each process, by what it is called. A row has what has changed, or nothing: it was heard.
        events: what has happened, in order, each with `time` (ISO 8601), `level`, `event` and its fields.
    """

    folder: Path
    config: Config
    summary: Mapping[str, Any]
    numbers: Mapping[str, Column]
    peers: Mapping[str, Mapping[str, Column]]
    events: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        """Say it in a line."""
        rows = len(self.numbers[TIME])
        return f"<run {self.folder.name}: {rows} rows, {len(self.peers)} processes, {len(self.events)} events>"

    def _repr_svg_(self) -> str | None:
        """Return what IPython shows of it; None: no round was trained yet."""
        learning = read_learning(self.folder)
        return draw(learning, caption_of(self.config, RunId(self.folder.name), learning)) if learning.trained else None

    def curve(self, name: str, over: str = "samples", *, peer: str | None = None) -> tuple[Column, Column]:
        """Return two numbers where a row has both: the one over which is drawn, and the named one.

        Args:
            over: such as samples, step or time.
            peer: of which process; None: of the run as a whole.

        Raises:
            KeyError: there is no such number, or no such process.
        """
        columns = self.numbers if peer is None else self.peers[peer]
        x, y = columns[over], columns[name]
        is_there = ~(np.isnan(x) | np.isnan(y))
        return x[is_there], y[is_there]


def load_run(path: str | Path) -> LoadedRun:
    """Load what a run has left, also while it goes on: then as far as it is.

    Args:
        path: its folder, such as `logs/sandbox`, the link to the newest run of that name.

    Raises:
        ConfigError: there is no run in this folder, its configuration is of another version, or its summary
            is damaged.
        OSError: a file cannot be read.
    """
    folder = Path(path).resolve()
    if not (folder / _CONFIG).is_file():
        raise ConfigError(f"{folder}: no run has left {_CONFIG} there; `shoal runs` lists the folders of runs")
    of_run: list[tuple[float, Mapping[str, float]]] = []
    of_peers: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
    for row in read_rows(folder):
        unix_s = row.time.timestamp()
        if row.run:
            of_run.append((unix_s, row.run))
        for peer, values in row.peers.items():
            of_peers.setdefault(peer, []).append((unix_s, values))
    return LoadedRun(
        folder,
        load_config(folder / _CONFIG, env={}),
        _summary(folder / SUMMARY_FILE),
        _columns(of_run),
        {peer: _columns(rows) for peer, rows in of_peers.items()},
        tuple(json.loads(event.line) for event in read_noted(folder)),
    )


def _columns(rows: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, Column]:
    """Return the numbers of these rows, each as long as there are rows: so a file may not have any number of names."""
    kept = list(rows)
    columns = {TIME: np.array([unix_s for unix_s, _ in kept], dtype=np.float64)}
    for at, (_, values) in enumerate(kept):
        for name, value in values.items():
            if name not in columns:
                if len(columns) > _MOST_COLUMNS:
                    continue
                columns[name] = np.full(len(kept), np.nan)
            columns[name][at] = value
    return columns


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except MALFORMED as error:
        raise ConfigError(f"{path} is no JSON ({error}): restore it from a copy, or remove it") from error
