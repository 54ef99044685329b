"""Where a model is cut: contiguous ranges of units, one for each stage. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.errors import ConfigError


def cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts units into `num_stages` contiguous, non-empty ranges so that the most expensive one costs least.

    Among equally good cuts, the one with the shortest early stages wins: they hold the activations of most microbatches
    in flight. O(units^2 * stages), which is nothing for hundreds of units.

    Args:
        costs: Relative cost of each unit, 0 or more.

    Returns:
        Ranges of unit indices in order, together `range(len(costs))`.

    Raises:
        ConfigError: Fewer units than stages, or less than one stage.
    """
    num_units = len(costs)
    _check_stage_count(num_stages, num_units)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[k][i]: the least possible maximum when units i.. make k + 1 stages; first[k][i]: where its first stage ends.
    best = [[before[num_units] - before[i] for i in range(num_units)]]
    first = [[num_units] * num_units]
    for k in range(1, num_stages):
        row, ends = [math.inf] * num_units, [num_units] * num_units
        for i in range(num_units - k):
            for end in range(i + 1, num_units - k + 1):
                worst = max(before[end] - before[i], best[k - 1][end])
                if worst < row[i]:
                    row[i], ends[i] = worst, end
        best.append(row)
        first.append(ends)
    ranges: list[range] = []
    start = 0
    for k in reversed(range(num_stages)):
        end = first[k][start]
        ranges.append(range(start, end))
        start = end
    return ranges


def cut_by_counts(counts: Sequence[int], num_units: int, num_stages: int) -> list[range]:
    """Cuts by hand: stage s gets the next `counts[s]` units.

    Raises:
        ConfigError: The counts are not one positive number for each stage, or do not add up to `num_units`.
    """
    _check_stage_count(num_stages, num_units)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_units:
        raise ConfigError(
            f"the cut {list(counts)} does not fit: give {num_stages} numbers of units, one for each stage, each at "
            f"least 1, that add up to the model's {num_units} units"
        )
    ranges: list[range] = []
    start = 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges


def _check_stage_count(num_stages: int, num_units: int) -> None:
    if not 1 <= num_stages <= num_units:
        raise ConfigError(
            f"the model has {num_units} units and cannot be cut into {num_stages} stages; choose 1 to {num_units}"
        )
