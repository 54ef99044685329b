"""Steps of one round that share samples: a record in which both stood would count samples once that were trained twice.

Leases see to it that this never happens (`lease.py`, `takeover.py`). Should it happen all the same, the coordinator can
see it in the joins before anybody prepares the record. Then the replicas that hold one of the two steps are left out of
the round: those with fewer samples if there is a choice, and never the last ones of a stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shoal.ids import PeerId, StepKey
from shoal.swarm.records import steps_held
from shoal.swarm.round_effects import TrainedTwice
from shoal.swarm.sample_ranges import merge
from shoal.wire.messages.round import Join
from shoal.wire.messages.step import StepEntry

_MOST_PAIRS = 1000
"""That are looked at together."""


def trained_twice(joins: Mapping[PeerId, Join]) -> list[TrainedTwice]:
    """Every two steps of these joins that share samples, and who has to be left out for it."""
    left = dict(joins)
    found: list[TrainedTwice] = []
    while True:
        pairs, has_more = _sharing(steps_held(join.log for join in left.values()))
        new = _leave_out(left, pairs)
        found += [each for each in new if each not in found]
        # Without who was left out there are fewer, so that the others come to light.
        if not has_more or not any(each.out for each in new):
            return found


def _leave_out(left: dict[PeerId, Join], pairs: Collection[tuple[StepKey, StepKey]]) -> list[TrainedTwice]:
    """Take from `left` who has to be left out for these pairs of steps."""
    if not pairs:
        return []
    holders: dict[StepKey, set[PeerId]] = {}
    for peer, join in left.items():
        for entry in join.log:
            holders.setdefault(entry.key, set()).add(peer)
    found: list[TrainedTwice] = []
    for first, second in sorted(pairs):
        sides = [tuple(sorted(holders[key] & left.keys())) for key in (first, second)]
        if not all(sides):
            continue  # one of them is out already
        sides.sort(key=lambda side: (sum(left[peer].num_samples for peer in side), side))
        out = next((side for side in sides if _is_served_without(left, side)), ())
        for peer in out:
            del left[peer]
        found.append(TrainedTwice(first, second, out))
    return found


def _sharing(steps: Mapping[StepKey, StepEntry]) -> tuple[set[tuple[StepKey, StepKey]], bool]:
    """The pairs of steps that have a sample in common, and whether there may be more: one replica can make up any
    number of steps, and all pairs of these."""
    parts = ((step.samples if len(step.samples) == 1 else merge(step.samples), key) for key, step in steps.items())
    ranges = sorted((i.pass_number, i.start, i.stop, key) for items, key in parts for i in items if i.start < i.stop)
    pairs: set[tuple[StepKey, StepKey]] = set()
    reaching: list[tuple[int, int, StepKey]] = []
    for pass_number, start, stop, key in ranges:
        reaching = [each for each in reaching if each[0] == pass_number and each[1] > start]
        pairs.update((min(key, other), max(key, other)) for _, _, other in reaching if other != key)
        if len(pairs) > _MOST_PAIRS:
            return pairs, True
        reaching.append((pass_number, stop, key))
    return pairs, False


def _is_served_without(joins: Mapping[PeerId, Join], side: Collection[PeerId]) -> bool:
    stages = {join.stage for join in joins.values()}
    return stages == {join.stage for peer, join in joins.items() if peer not in side}
