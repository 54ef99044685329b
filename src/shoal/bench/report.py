"""The figures of a benchmark as one object, for programs (`--json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.bench.measure import Measurement


def report(name: str, measurements: Sequence[Measurement], machine: Mapping[str, object]) -> dict[str, object]:
    """Return what `shoal benchmark NAME --json` prints: medians, and for each case how many times better ours is.

    Args:
        machine: see `shoal.bench.machine`.
    """
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
