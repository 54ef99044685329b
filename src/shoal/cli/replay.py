"""`shoal replay FOLDER`: replay a run, show how far it is, say what came of it."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shoal.cli.exits import DONE, FAILED
from shoal.cli.output import without_controls
from shoal.errors import ConfigError
from shoal.identity import load_swarm_key, swarm_authority
from shoal.replay.own_code import NamedCode
from shoal.replay.replay import Progress as OnProgress
from shoal.replay.replay import replay
from shoal.replay.verdict import Verdict
from shoal.runtime.hardware import num_usable_cores

_WIDTH = 120
_MOST_DIFFERENCES = 20
_STEPS_WORTH_A_PROCESS = 100
"""A process imports torch for two seconds before it computes anything."""


def replay_run(
    directory: Path,
    *,
    processes: int | None,
    swarm_key_file: Path | None,
    family: str | None,
    dataset_name: str | None,
    as_json: bool,
) -> int:
    """Replay a run and print the verdict; return the exit code.

    Args:
        directory: `logs/<run_id>`.
        processes: the most that compute; None: one for each core, if there is enough to do.
        swarm_key_file: of the swarm that the run must belong to; None: of the one that its first record names.
        family: code of somebody's own that the run may import as its model's family.
        dataset_name: the same, as its data set.

    Raises:
        ConfigError: the folder is not one of a run, or the key cannot be read.
        ShoalError: the run cannot be replayed.
    """
    if processes is not None and processes < 1:
        raise ConfigError(f"--processes {processes}: give a number of processes, at least 1")
    authority = None if swarm_key_file is None else swarm_authority(load_swarm_key(swarm_key_file)).peer_id
    errors = Console(stderr=True)
    with _progress(errors) as progress:
        verdict = replay(
            directory,
            authority=authority,
            named=NamedCode(family, dataset_name),
            num_processes=processes or num_usable_cores(),
            steps_per_process=_STEPS_WORTH_A_PROCESS if processes is None else 1,
            note=lambda text: errors.print(f"note: {without_controls(text)}", highlight=False, markup=False),
            progress=progress,
        )
    if as_json:
        print(json.dumps(verdict.as_json(), allow_nan=False))
    else:
        _show(verdict)
    return DONE if verdict.agrees else FAILED


@contextmanager
def _progress(console: Console) -> Generator[OnProgress]:
    """Give what shows how far a replay is: a bar on a terminal, else a line for each round."""
    if not console.is_terminal:
        shown = 0

        def tell(done: int, total: int, round: int) -> None:
            nonlocal shown
            if round > shown:
                shown = round
                console.print(f"round {round}, {done - 1} of {total} steps are computed", highlight=False)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, round: int) -> None:
            bar.update(task, completed=done, total=total, description=f"round {round}, steps")

        yield show


def _show(verdict: Verdict) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    lost = ", ".join(f"stage {stage}: {number}" for stage, number in sorted(verdict.steps_lost.items()))
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "run": verdict.run_id,
        "rounds that agree": f"{verdict.rounds_agreed} of {verdict.rounds}",
        "steps computed": f"{verdict.steps}",
        "samples consumed": f"{verdict.samples}" + (f" and {verdict.skipped} skipped" if verdict.skipped else ""),
        "samples repeated": f"{verdict.repeated}",
        "samples missing": f"{verdict.missing}",
        "steps lost": lost or "none",
        "took": f"{verdict.took_s:.1f} s",
    }
    for name, value in rows.items():
        table.add_row(name, without_controls(value))
    console.print(table, highlight=False)
    for difference in verdict.differences[:_MOST_DIFFERENCES]:
        differs = without_controls(f"differs: {difference}")
        console.print(differs, style="red", highlight=False, markup=False, soft_wrap=True)
    if verdict.agrees:
        console.print("Every round has come to the recorded hashes, bit for bit.", highlight=False)
