"""`shoal report`: a run as one page for a browser, from what it has left in its folder."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.event_lines import written_run
from shoal.cli.run_files import written_config
from shoal.errors import ConfigError
from shoal.report.page import write_page
from shoal.telemetry.rows import METRICS_FILE


def write_report(wanted: str, log_dir: Path) -> int:
    """Write the report of a run and print where it is; return the exit code.

    Args:
        wanted: folder or name of the run, or how its name begins; empty: the newest one.

    Raises:
        ConfigError: there is no such run, or more than one; or its files cannot be read, or the report not be written.
    """
    folder = written_run(wanted, log_dir, METRICS_FILE).resolve()
    config = written_config(folder)
    try:
        path = write_page(folder, config, folder.name)
    except OSError as error:
        raise ConfigError(f"cannot read or write {error.filename or folder} ({error.strerror or error})") from error
    if path is None:
        raise ConfigError(f"{folder} has no numbers of a run: give the folder of a run on its client's host")
    print(path)
    return 0
