"""Who computes what where a replay has several processes: generations are dealt out, paths cut, operations put in turn.

Pure, and the same in all processes: each goes through all actions of the run in one order, and carries out what is its
own. What it needs of another one comes from an operation that is earlier in that order, so nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

_TOLERANCE = 1.1
"""How much more than the mean a process may get, so that those who share steps stay together."""


def share_generations(steps: Mapping[tuple[int, ...], int], num_generations: int, num_processes: int) -> list[int]:
    """Return the process of each generation.

    Generations that compute many steps together share a process, unless it then gets too much work: what crosses from
    one process to another is sent, and waited for.

    Args:
        steps: how many are computed over each path of generations.
        num_generations: of the run; generations that compute nothing may go to any process.
        num_processes: the most to use; fewer paths and generations need fewer.
    """
    load = [0] * num_generations
    together: dict[tuple[int, int], int] = {}
    for path, number in steps.items():
        for generation in path:
            load[generation] += number
        for pair in pairwise(path):
            together[pair] = together.get(pair, 0) + number
    most = _TOLERANCE * sum(load) / num_processes
    group = list(range(num_generations))
    load_of = dict(enumerate(load))
    for one, other in sorted(together, key=lambda pair: (-together[pair], pair)):
        kept, joined = group[one], group[other]
        if kept != joined and load_of[kept] + load_of[joined] <= most:
            load_of[kept] += load_of.pop(joined)
            group = [kept if each == joined else each for each in group]
    given = [0] * num_processes
    process_of: dict[int, int] = {}
    for number in sorted(load_of, key=lambda each: (-load_of[each], each)):
        process_of[number] = min(range(num_processes), key=given.__getitem__)
        given[process_of[number]] += load_of[number]
    return [process_of[each] for each in group]


class Stretch(NamedTuple):
    """Stages of a path, one after the other, that one process computes: `start` to `stop`, without it."""

    process: int
    start: int
    stop: int


def stretches(processes: Sequence[int]) -> list[Stretch]:
    """Cut a path; `processes` says of each of its stages who computes it."""
    found: list[Stretch] = []
    for process, stages in groupby(processes):
        start = found[-1].stop if found else 0
        found.append(Stretch(process, start, start + len(list(stages))))
    return found


class Turn(NamedTuple):
    """One microbatch through one stretch of a path. Forward, the last stretch goes back as well."""

    stretch: int
    microbatch: int
    is_backward: bool


def turns(num_stretches: int, microbatches: Iterable[int]) -> Iterator[Turn]:
    """Yield the operations of a step in an order in which each follows what it needs.

    It is that of 1F1B on devices of equal speed: each stretch does a forward and a backward by turns, and stretch g of
    G holds at most G - g microbatches. With one stretch each microbatch goes all the way before the next one begins.
    """
    last = num_stretches - 1
    found: list[tuple[int, Turn]] = []
    for microbatch in microbatches:
        for stretch in range(num_stretches):
            found.append((stretch + 2 * microbatch, Turn(stretch, microbatch, False)))
            if stretch < last:
                found.append((2 * last + 1 - stretch + 2 * microbatch, Turn(stretch, microbatch, True)))
    return (turn for _, turn in sorted(found))
