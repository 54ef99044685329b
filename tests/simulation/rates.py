"""How often each mutant is noticed: figures in `rates.json`, so that a gate can ask for enough of it.

A mutant that one seed in a hundred thousand notices is as good as unnoticed: nobody runs so many to change a rule.
So each has to be noticed by one in two thousand at least; else its world needs more of the fault that brings it out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.simulation.mutants import MUTANTS

FILE = Path(__file__).with_name("rates.json")
LEAST_PER_THOUSAND = 0.5
ENOUGH = 3
"""So often noticed says how often it is; no more seeds are run then."""
MOST_SEEDS = round(ENOUGH * 1000 / LEAST_PER_THOUSAND)
_STRETCH = 250


class Rate(NamedTuple):
    """Of the seeds from 0 on, so many notice."""

    noticed: int
    seeds: int

    @property
    def per_thousand(self) -> float:
        """Of the seeds that were run."""
        return 1000 * self.noticed / self.seeds if self.seeds else 0.0

    @property
    def is_known(self) -> bool:
        """Whether more seeds would tell nothing that the gate asks for."""
        return self.noticed >= ENOUGH or self.seeds >= MOST_SEEDS


def known() -> dict[str, Rate]:
    """Return the figures of the file."""
    return {name: Rate(*figures) for name, figures in json.loads(FILE.read_text()).items()} if FILE.exists() else {}


def measure(names: Iterable[str], anew: bool) -> int:
    """Measure what is not known yet, or everything anew, and write it down; returns 1 if one is noticed too seldom.

    Those that are noticed often are known first; so who ends it has most of them, and it goes on where it was.
    """
    rates = {name: Rate(0, 0) if anew else known().get(name, Rate(0, 0)) for name in names}
    while unknown := [name for name, rate in rates.items() if not rate.is_known]:
        for name in unknown:
            rates[name] = _further(name, rates[name])
            _write({name: rates[name]})
    for name, rate in rates.items():
        print(f"{name:40} {rate.per_thousand:8.1f} per 1,000 ({rate.noticed} of {rate.seeds})")
    return 1 if any(rate.per_thousand < LEAST_PER_THOUSAND for rate in rates.values()) else 0


def _write(measured: Mapping[str, Rate]) -> None:
    rates = {name: rate for name, rate in known().items() if name in MUTANTS} | measured
    lines = ",\n".join(f'  "{name}": [{rate.noticed}, {rate.seeds}]' for name, rate in sorted(rates.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n")


def _further(name: str, rate: Rate) -> Rate:
    """Run the next seeds of a mutant, up to where it has been noticed often enough."""
    stop = min(rate.seeds + _STRETCH, MOST_SEEDS)
    noticed = rate.noticed
    for seed in MUTANTS[name].noticing(range(rate.seeds, stop)):
        noticed += 1
        if noticed == ENOUGH:
            return Rate(noticed, seed + 1)
    return Rate(noticed, stop)
