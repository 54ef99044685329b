"""Where a model is cut: contiguous ranges of units, one for each stage. Pure, no torch.

A model whose first and last unit share a parameter is *wrapped*: the first stage hosts both, and the parameter is one.

    units     0 1 2 | 3 4 5 | 6 7 | 8
    stages      0   |   1   |  2  | 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from shoal.errors import ConfigError


class StageUnits(NamedTuple):
    """The units of one stage.

    Attributes:
        own: In a row.
        head: The model's last one, in the first stage of a wrapped model; else empty.
    """

    own: range
    head: range = range(0)

    @property
    def indices(self) -> tuple[int, ...]:
        """All of them, in the order of the model."""
        return (*self.own, *self.head)


def counts_by_cost(costs: Sequence[float], num_stages: int, *, is_tied: bool = False) -> tuple[int, ...]:
    """The units of each stage so that the most expensive stage costs least.

    Args:
        costs: See `cut`.
        is_tied: Whether the first and the last unit share a parameter, so that one stage has both.

    Raises:
        ConfigError: There are fewer units than stages.
    """
    if not is_tied or num_stages == 1:
        return tuple(len(units) for units in cut(costs, num_stages))
    _check_wrapped(num_stages, len(costs))
    first, *others = cut([costs[0] + costs[-1], *costs[1:-1]], num_stages)
    return (len(first) + 1, *(len(units) for units in others))


def units_by_counts(
    counts: Sequence[int], num_units: int, num_stages: int, *, is_tied: bool = False
) -> list[StageUnits]:
    """The units of every stage, of which stage s has `counts[s]`.

    Args:
        is_tied: See `counts_by_cost`.

    Raises:
        ConfigError: The counts do not fit.
    """
    if is_tied and num_stages > 1:
        _check_wrapped(num_stages, num_units)
    ranges = cut_by_counts(counts, num_units, num_stages)
    if not is_tied or num_stages == 1:
        return [StageUnits(units) for units in ranges]
    if counts[0] < 2:
        raise ConfigError(
            f"the cut {list(counts)} does not fit: the first and the last unit share a parameter, and the first stage "
            "hosts both; give it 2 units at least"
        )
    # The last unit is the first stage's, so that each stage begins one unit earlier.
    others = [range(units.start - 1, units.stop - 1) for units in ranges[1:]]
    return [StageUnits(range(counts[0] - 1), range(num_units - 1, num_units)), *map(StageUnits, others)]


def _check_wrapped(num_stages: int, num_units: int) -> None:
    if num_stages >= num_units:
        raise ConfigError(
            f"the model has {num_units} units, of which the first and the last one share a parameter and are one "
            f"stage's: it cannot be cut into {num_stages} stages; choose 1 to {num_units - 1}"
        )


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
