"""`shoal runs export`, `shoal trace`, `shoal report`: a run's numbers and course for other programs, or as a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from shoal.cli.event_lines import written_run
from shoal.cli.listing_runs import end_of
from shoal.cli.run_files import written_config
from shoal.config import published_values
from shoal.errors import ConfigError
from shoal.events.base import EVENTS_FILE, SUMMARY_FILE
from shoal.monitor.exporters.base import read_noted
from shoal.monitor.exporters.metrics_file import read_rows
from shoal.monitor.exporters.wandb_run import WandbRun, WandbSettings
from shoal.report.page import write_page
from shoal.report.rows import write_csv, write_tensorboard
from shoal.report.trace import trace_of
from shoal.runtime.durable_files import put_whole
from shoal.telemetry.rows import METRICS_FILE, MetricRow

_LACKS: Final = {
    METRICS_FILE: "curves have a point for each round",
    EVENTS_FILE: "nothing is known of its rounds and of what has happened",
}
"""What a report lacks without a file of the run."""

Form = Literal["csv", "tensorboard", "wandb"]


def export_numbers(wanted: str, log_dir: Path, form: Form, output: Path | None) -> int:
    """Write the numbers of a run in another form; return the exit code.

    Args:
        wanted: folder or name of the run, or how its name begins; empty: the newest one.
        output: a folder, made if it is missing; None: `exported-FORM` in the run's.

    Raises:
        ConfigError: there is no such run, or more than one, or a package is missing, or a file cannot be used.
    """
    source = written_run(wanted, log_dir, METRICS_FILE)
    folder = output or source / f"exported-{form}"
    if output is None and folder.is_symlink():
        raise ConfigError(f"{folder} is a link, and the run's folder may be somebody else's: give an --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty: remove it, or give another --output")
        written = _write(form, source, read_rows(source), folder)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename or folder} ({error.strerror or error})") from error
    for path in written:
        print(path)
    return 0 if written else 1


def write_trace(wanted: str, log_dir: Path, output: Path | None) -> int:
    """Write the course of a run for Perfetto; return the exit code.

    Args:
        wanted: as for `export_numbers`.
        output: the file; None: `trace.json` in the run's folder.

    Raises:
        ConfigError: as `export_numbers`.
    """
    source = written_run(wanted, log_dir, EVENTS_FILE)
    path = output or source / "trace.json"
    try:
        trace = trace_of(read_noted(source), read_rows(source))
        if output is None:
            # Not through a link: others may have made the run's folder.
            put_whole(path, trace, lasting=False)
        else:
            path.write_bytes(trace)
    except OSError as error:
        raise ConfigError(f"cannot use {error.filename or path} ({error.strerror or error})") from error
    print(path)
    print("open it at https://ui.perfetto.dev, or in chrome://tracing")
    return 0


def _write(form: Form, source: Path, rows: Iterable[MetricRow], folder: Path) -> list[Path]:
    match form:
        case "csv":
            return write_csv(rows, folder)
        case "tensorboard":
            return write_tensorboard(rows, folder)
        case "wandb":
            return _write_wandb(source, rows, folder)


def _write_wandb(source: Path, rows: Iterable[MetricRow], folder: Path) -> list[Path]:
    config = written_config(source)
    run_id = source.resolve().name
    settings = WandbSettings(
        name=run_id,
        directory=folder,
        config=published_values(config),
        project=config.wandb_project,
        entity=config.wandb_entity,
        run_id=config.wandb_run_id or run_id,
        is_offline=True,
    )
    run = WandbRun(settings, print)
    for event in read_noted(source):
        run.event(event)
    is_written = run.write(values for row in rows if (values := run.values_of(row)))
    return [folder] if is_written else []


def write_report(wanted: str, log_dir: Path) -> int:
    """Write the report of a run and print where it is, and what of the run was missing; return the exit code.

    Args:
        wanted: folder or name of the run, or how its name begins; empty: the newest one.

    Raises:
        ConfigError: there is no such run, or more than one; or its files cannot be read, or the report not be written.
    """
    folder = written_run(wanted, log_dir, *_LACKS, SUMMARY_FILE).resolve()
    config = written_config(folder)
    ended, commands = end_of(folder, config)
    missing = [f"{name} is missing, so {lack}" for name, lack in _LACKS.items() if not (folder / name).exists()]
    try:
        path = write_page(folder, config, folder.name, "; ".join((ended, *missing)), commands)
    except OSError as error:
        raise ConfigError(f"cannot read or write {error.filename or folder} ({error.strerror or error})") from error
    if path is None:
        raise ConfigError(
            f"{folder}: its files say nothing of a round, so there is nothing to report: give the folder of a run that "
            "has begun to train, on its client's host"
        )
    for line in missing:
        print(line, file=sys.stderr)
    print(path)
    return 0
