"""Few cases of many axes: where two values that meet tell as much as all that meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[int, Any, int, Any]


def covering(axes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few cases that have each pair of values of two axes: again and again the one that has most of those left."""
    pairs = {case: _pairs(case) for case in itertools.product(*axes.values())}
    left = set[Pair]().union(*pairs.values())
    cases: list[tuple[Any, ...]] = []
    while left:
        best = max(pairs, key=lambda case: len(pairs[case] & left))
        left -= pairs[best]
        cases.append(best)
    return cases


def _pairs(case: Sequence[Any]) -> set[Pair]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}
