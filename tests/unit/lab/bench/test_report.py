"""The figures of a benchmark, for programs and for people."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shoal_lab.bench.measure import Measurement
from shoal_lab.bench.report import describe_machine, figure, report, results_table

MEASURED = (
    Measurement("gloo 64 MB 2 peers", "GB/s", (2.0, 3.0, 2.5), (1.25, 1.0, 2.0), larger_is_better=True),
    Measurement("monitor", "MB", (1234.0,), (), larger_is_better=False),
)


def test_the_object_has_the_medians_and_the_ratio_of_each_case() -> None:
    assert report("ring", MEASURED, {"cores": 2}) == {
        "name": "ring",
        "results": [
            {"case": "gloo 64 MB 2 peers", "ours": 2.5, "reference": 1.25, "unit": "GB/s", "ratio": 2.0},
            {"case": "monitor", "ours": 1234.0, "reference": None, "unit": "MB", "ratio": None},
        ],
        "machine": {"cores": 2},
    }


def test_the_table_shows_medians_ranges_and_ratios() -> None:
    output = io.StringIO()
    Console(file=output, width=200).print(results_table("ring", MEASURED))
    rows = {line.split("│")[1].strip(): line for line in output.getvalue().splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["gloo 64 MB 2 peers"].split("│")[1:-1]] == [
        *("gloo 64 MB 2 peers", "GB/s", "2.50", "2.00 .. 3.00", "1.25", "1.00 .. 2.00", "2.00")
    ]
    assert [cell.strip() for cell in rows["monitor"].split("│")[1:-1]] == [
        *("monitor", "MB", "1,234", "1,234 .. 1,234", "-", "-", "-")
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (12345.6, "12,346")]
)
def test_figures_have_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_the_description_names_what_decides_about_speed_and_can_be_written_as_json() -> None:
    machine = json.loads(json.dumps(describe_machine()))
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["torch"]
    assert {"processor", "kernel", "python", "load_1min"} <= machine.keys()
