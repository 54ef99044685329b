"""An all-reduce without a network: all members in one process, the sums of `plan` one after the other.

The additions are those of `operation`, in the same order and by the same code (`vectors`), so the bits are too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.collective.plan import Collective, CollectivePlan, choose_collective
from shoal.collective.vectors import RingVector


def reduce_in_turn(
    members: Sequence[RingVector], choose: Callable[[int, int], Collective] = choose_collective
) -> RingVector:
    """Reduce the members' vectors, each in its place, and return one that holds the result.

    Args:
        members: The same vector of each member, in ring order; their contributions are overwritten.
        choose: Returns the collective for a vector's size (bytes) and number of members.
    """
    first = members[0]
    collective = choose(first.values_N.nbytes, len(members))
    plan = CollectivePlan.all_reduce(collective, len(members), first.values_N.numel(), max(1, first.values_N.numel()))
    for root, elements in enumerate(plan.chunks):
        if len(elements):
            for member, child in _additions(plan, root, root):
                is_complete = member == root and child == plan.children(member, root)[-1]
                members[member].add(elements, members[child].encoded(elements), is_complete)
            if root:
                first.store(elements, members[root].piece(elements))
    return first


def _additions(plan: CollectivePlan, root: int, top: int) -> list[tuple[int, int]]:
    """Who adds whose sum of a chunk to its own, so that what is added is complete: children before parents."""
    found: list[tuple[int, int]] = []
    stack = [top]
    while stack:
        member = stack.pop()
        children = plan.children(member, root)
        found += [(member, child) for child in reversed(children)]
        stack += children
    return found[::-1]
