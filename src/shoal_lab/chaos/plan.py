"""Which faults come when: a function of the seed alone.

Each interval of `every_s` has one fault, somewhere in its middle half, so that two of them are never close together and
their number does not depend on luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shoal.errors import ConfigError
from shoal_lab.faults.deaths import KINDS

MIN_EVERY_S = 1.0
"""Faults that come faster than a process can be started again tell nothing about a swarm."""
HELD_S = (1.0, 6.0)
"""How long a process stays frozen: shorter and longer than the silence after which it counts as dead."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault.

    Attributes:
        number: counted from 0.
        at_s: since the faults begin.
        kind: one of `KINDS`.
        dice: seed for what the kind chooses, such as the victim.
        held_s: how long the fault lasts until it is undone from outside; 0: the swarm ends it.
    """

    number: int
    at_s: float
    kind: str
    dice: str
    held_s: float


def plan_faults(seed: int, for_s: float, every_s: float, kinds: Sequence[str]) -> tuple[PlannedFault, ...]:
    """Return the faults of a run.

    Args:
        every_s: one fault falls into each such interval.
        kinds: to choose from, each with the same probability.

    Raises:
        ConfigError: there is no such kind, or the times make no sense.
    """
    if unknown := sorted(set(kinds) - KINDS.keys()):
        raise ConfigError(f"--kinds: there is no {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if not kinds:
        raise ConfigError(f"--kinds: name at least one of {', '.join(KINDS)}")
    if every_s < MIN_EVERY_S:
        raise ConfigError(f"--every: at least {MIN_EVERY_S:g}s")
    if for_s < every_s:
        raise ConfigError(f"--for: at least as long as --every ({every_s:g}s), or there is no fault at all")
    dice = Random(f"chaos {seed}")
    faults: list[PlannedFault] = []
    for number in range(int(for_s / every_s)):
        at_s = (number + dice.uniform(0.25, 0.75)) * every_s
        kind = dice.choice(list(kinds))
        held_s = dice.uniform(*HELD_S)
        held_s = round(held_s, 3) if KINDS[kind].held_s else 0.0
        faults.append(PlannedFault(number, round(at_s, 3), kind, f"{seed} {number}", held_s))
    return tuple(faults)
