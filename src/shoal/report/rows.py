"""The rows and events of a run as other programs read them: tables, TensorBoard, W&B.

metrics.jsonl, peers.jsonl --read_rows--> rows --write_csv----------> metrics.csv, peers.csv
                                 '-write_tensorboard---> events.out.tfevents...
                                 '-`WandbRun.write` ---> one offline run, whatever the monitor has lived through
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from shoal.errors import ConfigError
from shoal.telemetry.rows import MetricRow


def write_csv(rows: Iterable[MetricRow], folder: Path) -> list[Path]:
    """Write two tables: of the run a row a second and a column a number, of the peers a row a number.

    Returns:
        The files.

    Raises:
        OSError: they cannot be written.
    """
    kept = list(rows)
    columns = sorted({name for row in kept for name in row.run})
    of_run, of_peers = folder / "metrics.csv", folder / "peers.csv"
    with of_run.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("time", *columns))
        for row in kept:
            if row.run:
                table.writerow((row.time.isoformat(), *(row.run.get(name, "") for name in columns)))
    with of_peers.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("time", "who", "number", "value"))
        for row in kept:
            for who, values in row.peers.items():
                table.writerows((row.time.isoformat(), who, name, value) for name, value in values.items())
    return [of_run, of_peers]


def write_tensorboard(rows: Iterable[MetricRow], folder: Path) -> list[Path]:
    """Write what TensorBoard reads; its steps are samples of the run.

    Returns:
        The folder.

    Raises:
        ConfigError: the package that writes its files is missing.
        OSError: they cannot be written.
    """
    try:
        import tensorboardX  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ConfigError("TensorBoard's files need a package: pip install 'shoal[tensorboard]'") from error
    writer = cast(Any, tensorboardX).SummaryWriter(str(folder))
    samples = 0
    for row in rows:
        samples = int(row.run.get("samples", samples))
        for name, value in row.flat().items():
            writer.add_scalar(name, value, samples, row.time.timestamp())
    writer.close()
    return [folder]
