"""`shoal benchmark NAME`: calibrate, measure, calibrate again, show."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console

from shoal.cli.early import Interrupts
from shoal.errors import ConfigError
from shoal_lab.bench.busy import Calibration, calibrate, require_idle
from shoal_lab.bench.case import BenchmarkOptions, Case
from shoal_lab.bench.measure import Measurement, measure
from shoal_lab.bench.registry import find_benchmark, load_open_cases
from shoal_lab.bench.report import describe_machine, report, results_table

_WIDEST = 200


def run_benchmark(name: str, options: BenchmarkOptions, *, as_json: bool) -> int:
    """Measure and print, and return the exit code.

    Args:
        as_json: print one JSON object instead of a table.

    Raises:
        ConfigError: there is no such benchmark or case, or it cannot do what the options say.
        MachineBusy: the machine was not free before or after the measurement.
    """
    benchmark = find_benchmark(name, options)
    repeat = options.repeat or benchmark.repeat
    measurements: list[Measurement] = []
    # First of all: an import takes seconds, and may lose a Ctrl-C.
    with Interrupts() as interrupts, _progress() as show:

        def say(what: str) -> None:
            interrupts.check()
            show(what)

        open_cases = load_open_cases(name, benchmark)
        machine = describe_machine()
        before = _calibrated("before the measurement", say, options.ignore_busy)
        say(f"{name}: starting")
        with open_cases(options) as cases:
            for case in _chosen(cases, options):
                measurements.append(measure(case, repeat, lambda what: say(f"{name}: {what}")))
        after = _calibrated("after the measurement", say, options.ignore_busy)
    machine["cores_free"] = [round(before.cores_got, 2), round(after.cores_got, 2)]
    if as_json:
        print(json.dumps(report(name, measurements, machine), allow_nan=False))
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDEST)
    console.print(results_table(name, measurements))
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), highlight=False, style="dim")
    if not (before.idle and after.idle):
        console.print("The machine was busy: these figures do not count.", style="bold red")
    return 0


def _chosen(cases: Sequence[Case], options: BenchmarkOptions) -> list[Case]:
    """Return the cases that are asked for.

    Raises:
        ConfigError: there are none.
    """
    chosen = [case for case in cases if options.chooses(case.name)]
    if not chosen:
        raise ConfigError(f"--only {options.only}: no case has that in its name; without it all are measured")
    return chosen


def _calibrated(when: str, say: Callable[[str], None], ignore_busy: bool) -> Calibration:
    say(f"calibrating {when}")
    calibration = calibrate()
    if not ignore_busy:
        require_idle(calibration, when)
    return calibration


@contextmanager
def _progress() -> Generator[Callable[[str], None], None, None]:
    """Give a function that shows on a terminal what is done now, on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield lambda what: status.update(what)
