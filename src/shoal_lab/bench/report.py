"""The figures of a benchmark, and the machine that it ran on: for people, and as one object for programs (`--json`)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

from rich.table import Table

from shoal.runtime.hardware import installed_version, num_usable_cores, processor_name
from shoal_lab.bench.measure import Measurement

_LIBRARIES = ("torch", "hivemind", "numpy", "uvloop")


def describe_machine() -> dict[str, object]:
    """Return what somebody else needs to know to judge the figures: cores, processor, memory, versions and load."""
    return {
        "cores": num_usable_cores(),
        "processor": processor_name(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: installed_version(name) for name in _LIBRARIES},
        "load_1min": round(os.getloadavg()[0], 2),
    }


def report(name: str, measurements: Sequence[Measurement], machine: Mapping[str, object]) -> dict[str, object]:
    """Return what `shoal benchmark NAME --json` prints: medians, and for each case how many times better ours is."""
    return {
        "name": name,
        "results": [
            {
                "case": each.case,
                "ours": each.ours_median,
                "reference": each.reference_median,
                "unit": each.unit,
                "ratio": each.ratio,
            }
            for each in measurements
        ],
        "machine": dict(machine),
    }


def results_table(name: str, measurements: Sequence[Measurement]) -> Table:
    """Return a table with one row a case: median and range of both sides, and how many times better ours is."""
    repeat = max((len(each.ours) for each in measurements), default=0)
    table = Table(
        title=f"{name}: medians of {repeat}, smallest and largest value; a ratio above 1: ours is better",
        title_justify="left",
    )
    for heading in ("case", "unit"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ours", "min .. max", "reference", "min .. max", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in measurements:
        ratio = each.ratio
        table.add_row(
            each.case,
            each.unit,
            figure(each.ours_median),
            _spread(each.ours),
            figure(each.reference_median),
            _spread(each.reference),
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table


def figure(value: float | None) -> str:
    """Return a value with three or more significant digits and without an exponent; "-" if there is none."""
    if value is None:
        return "-"
    decimals = next((digits for digits, bound in ((0, 100), (1, 10), (2, 1)) if abs(value) >= bound), 4)
    return f"{value:,.{decimals}f}"


def _spread(values: Sequence[float]) -> str:
    return f"{figure(min(values))} .. {figure(max(values))}" if values else "-"
