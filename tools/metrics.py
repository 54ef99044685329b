"""Prints docs/metrics.md from the catalogue of numbers: `python tools/metrics.py > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.telemetry.catalogue import CATALOGUE, RUN, MetricKind, outside_name, outside_run_name

HEAD = """# Metrics

Every number that shoal measures, made from `src/shoal/telemetry/catalogue.py` by `tools/metrics.py`. The first name is
that of `metrics.jsonl`, W&B and `shoal runs export`; the second one is Prometheus's, in base units, where each number
of a process has the labels `who` and `role` besides its own.
"""
OF_RUN = """## Of the run

In `metrics.jsonl` under `run`, in W&B under these names. A row is about a second: of what comes with each step it has
the mean, of everything else the last value, and nothing of what has not changed.
"""
OF_PROCESS = """## Of each process

In `peers.jsonl` under `peers` and what the process is called, without labels; in W&B as
`server 1@box2/step.committed`. Of a histogram these have `/p50` and `/p95`. Two speeds follow from counters:
`samples_per_s`, and `busy`, the share of the time in which the device has worked. Of a server they say its `stage` too,
and `held_round`, the newest round whose record it holds (-1: none).
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, OF_RUN, *_of_run(), "", OF_PROCESS, *_of_processes()]
    return "\n".join(lines) + "\n"


def _of_run() -> Iterator[str]:
    yield "| name | in Prometheus | what it says |"
    yield "|---|---|---|"
    for name, number in RUN.items():
        label = f"{{{number.label}}}" if number.label else ""
        slash = f"`{name}/{number.label.upper()}`" if number.label else f"`{name}`"
        yield f"| {slash} | `{outside_run_name(name)}{label}` | {number.help} |"


def _of_processes() -> Iterator[str]:
    yield "| name | kind | in Prometheus | what it says |"
    yield "|---|---|---|---|"
    for name, metric in CATALOGUE.items():
        total = "_total" if metric.kind is MetricKind.COUNTER else ""
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        yield f"| `{name}` | {metric.kind} | `{outside_name(name)}{total}{labels}` | {metric.help} |"


if __name__ == "__main__":
    print(page(), end="")
