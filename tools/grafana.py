"""Prints docs/grafana.json from the catalogue of numbers: `python tools/grafana.py > docs/grafana.json`.

A dashboard to import into Grafana, over a data source of Prometheus that is chosen there: a panel for each number of
the run, then for each number of the processes; of counters the rate, of histograms median and 95th percentile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

from shoal.telemetry.catalogue import CATALOGUE, RUN, Metric, MetricKind, outside_name, outside_run_name

_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3
_UNITS = {"_bytes": "bytes", "_seconds": "s", "_per_second": "cps"}
_CHOICE = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """What a panel draws: expressions in PromQL, each with the text of its legend."""

    title: str
    help: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def page() -> str:
    """Return the whole file."""
    dashboard = {
        "title": "shoal",
        "uid": "shoal",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_placed()),
    }
    return json.dumps(dashboard, indent=1) + "\n"


def _placed() -> Iterator[dict[str, Any]]:
    """Yield all panels of the file, below the titles of their parts."""
    numbers, top = count(1), 0
    for title, panels in (("Run", list(_of_run())), ("Processes", list(_of_processes()))):
        yield {"id": next(numbers), "type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        for place, panel in enumerate(panels):
            row, column = divmod(place, _COLUMNS)
            yield _panel(next(numbers), panel, x=column * _WIDTH, y=top + 1 + row * _HEIGHT)
        top += 1 + -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(number: int, panel: Panel, *, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": f"{place}", "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for place, (expression, legend) in enumerate(panel.lines)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": list[Any]()},
        "targets": targets,
    }


def _of_run() -> Iterator[Panel]:
    for name, number in RUN.items():
        outside = outside_run_name(name)
        legend = f"{{{{{number.label}}}}}" if number.label else name
        yield Panel(name, number.help, _unit(outside), ((outside, legend),))


def _of_processes() -> Iterator[Panel]:
    for name, metric in CATALOGUE.items():
        outside = outside_name(name)
        yield Panel(name, metric.help, _unit(outside), tuple(_lines(outside, metric)))


def _lines(outside: str, metric: Metric) -> Iterator[tuple[str, str]]:
    """Yield what is drawn of a number: summed over its own labels, where there is a sum."""
    match metric.kind:
        case MetricKind.COUNTER:
            yield f"sum by (who) (rate({outside}_total[1m]))", "{{who}}"
        case MetricKind.GAUGE if metric.labels == ("what",):
            yield outside, "{{who}}: {{what}}"  # of numbers of errors there is no sum
        case MetricKind.GAUGE:
            yield f"sum by (who) ({outside})", "{{who}}"
        case MetricKind.HISTOGRAM:
            for title, share in (("median", 0.5), ("95 %", 0.95)):
                buckets = f"sum by (le) (rate({outside}_bucket[5m]))"
                yield f"histogram_quantile({share}, {buckets})", title


def _unit(outside: str) -> str:
    found = (unit for ending, unit in _UNITS.items() if outside.endswith(ending))
    return next(found, "short")


if __name__ == "__main__":
    print(page(), end="")
