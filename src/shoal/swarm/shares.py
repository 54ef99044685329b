"""How many samples of each step every trainer gets, so that all reach the end of the round together. Pure.

A round has `num_steps` steps, and each step has the same number of samples over all slots. The sizes of a step are
fixed when the first trainer gets near it, from what is known then: how fast each slot trains, and how much it has been
given and not trained yet. So the same rule follows speeds from round to round and corrects within a round, also in the
first one, where nothing is known when it begins.

    speeds, samples still to train --even_finish--> samples for the steps that are left --round--> sizes of one step

Sizes are proportional to samples per second as measured at the present size, which is right also where a step takes a
fixed time besides: they rest only where all slots take the same time for a step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 5
"""The speed is the median of so many steps: one that was replayed, or interrupted, does not count."""

TOLERANCE = 0.03
"""Sizes stay as they are while all are expected to end within this part of the time that is left, or within that of a
sample: early in a round noise moves nothing, and in the end nobody waits for much more than a sample."""

OVERDUE = 1.5
"""A step that takes longer than expected by this factor makes its slot count as slower, before it has ended."""

_HALVINGS = 60


class Speed:
    """Of one slot, in samples per second."""

    def __init__(self, samples_per_s: float = 0.0) -> None:
        """Begin with what is known; 0: nothing."""
        # Twice: the first step that is measured does not outweigh it, the third does.
        self._rates = deque[float]([samples_per_s] * 2 if samples_per_s > 0 else [], WINDOW)

    @property
    def samples_per_s(self) -> float:
        """The median of the last steps; 0: not known yet."""
        return statistics.median(self._rates) if self._rates else 0.0

    def measured(self, num_samples: int, duration_s: float) -> None:
        """A step is trained."""
        if num_samples > 0 and duration_s > 0:
            self._rates.append(num_samples / duration_s)


@dataclass(frozen=True, slots=True)
class Standing:
    """A slot in the middle of a round.

    Attributes:
        samples_per_s: more than 0.
        pending: samples that it has or will certainly be given, and has not trained yet.
    """

    samples_per_s: float
    pending: float = 0.0


def known(speeds: Sequence[float]) -> list[float]:
    """Return the speeds with the mean in place of each that is not known (0); if none is, all are the same."""
    measured = [speed for speed in speeds if speed > 0]
    mean = sum(measured) / len(measured) if measured else 1.0
    return [speed if speed > 0 else mean for speed in speeds]


def bounds(total: int, weights: Sequence[float]) -> list[int]:
    """Return where `total` is cut into parts in proportion to `weights`: part i is [bounds[i], bounds[i + 1])."""
    whole, before, cuts = sum(weights), 0.0, [0]
    for weight in weights[:-1]:
        before += weight
        cuts.append(round(total * before / whole))
    return [*cuts, total]


def even_finish(standings: Sequence[Standing], num_samples: int, lowest: int, highest: int) -> list[float]:
    """Deal out samples so that all slots end as nearly together as can be.

    Args:
        num_samples: to deal out, between `lowest` and `highest` times the number of slots.
        lowest: the fewest samples that a slot gets.
        highest: the most samples that a slot gets.

    Returns:
        Samples for each slot; their sum is `num_samples` up to rounding.
    """

    def dealt(end_s: float) -> list[float]:
        return [min(max(each.samples_per_s * end_s - each.pending, lowest), highest) for each in standings]

    early_s, late_s = 0.0, max((highest + each.pending) / each.samples_per_s for each in standings)
    for _ in range(_HALVINGS):
        middle_s = (early_s + late_s) / 2
        if sum(dealt(middle_s)) < num_samples:
            early_s = middle_s
        else:
            late_s = middle_s
    return dealt(late_s)


class StepSizes:
    """The sizes of one step after the other."""

    def __init__(self, num_slots: int, samples_per_step: int, max_samples: int | None = None) -> None:
        """Begin with equal sizes.

        Args:
            samples_per_step: of each slot if all get the same, at least 1.
            max_samples: the most that a slot gets in a step, at least `samples_per_step`; None: any number.
        """
        self._total = num_slots * samples_per_step
        most = self._total - num_slots + 1
        self._highest = most if max_samples is None else min(max_samples, most)
        self._sizes = [float(samples_per_step)] * num_slots
        # What rounding has kept from a slot so far: 7.5 samples are 7 and 8 in turns.
        self._owed = [0.0] * num_slots

    def next(self, standings: Sequence[Standing], steps_left: int) -> tuple[int, ...]:
        """Return how many samples of the next step each slot gets: at least 1, and always the same sum.

        Args:
            steps_left: steps of the round whose sizes are not fixed, including this one.
        """
        ends_s = [
            (each.pending + size * steps_left) / each.samples_per_s
            for each, size in zip(standings, self._sizes, strict=True)
        ]
        sample_s = max(1 / each.samples_per_s for each in standings)
        if max(ends_s) - min(ends_s) > max(TOLERANCE * max(ends_s), sample_s):
            dealt = even_finish(standings, self._total * steps_left, steps_left, self._highest * steps_left)
            self._sizes = [samples / steps_left for samples in dealt]
        return self._rounded()

    def _rounded(self) -> tuple[int, ...]:
        wanted = [size + owed for size, owed in zip(self._sizes, self._owed, strict=True)]
        sizes = [min(max(int(each), 1), self._highest) for each in wanted]
        slots = range(len(sizes))
        while (missing := self._total - sum(sizes)) != 0:
            if missing > 0:
                slot = max((s for s in slots if sizes[s] < self._highest), key=lambda s: wanted[s] - sizes[s])
                sizes[slot] += 1
            else:
                slot = min((s for s in slots if sizes[s] > 1), key=lambda s: wanted[s] - sizes[s])
                sizes[slot] -= 1
        self._owed = [each - size for each, size in zip(wanted, sizes, strict=True)]
        return tuple(sizes)
