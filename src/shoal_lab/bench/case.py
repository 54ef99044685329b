"""What a benchmark is made of: its options, and cases with our way and the reference's to do one thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """The user's options.

    Attributes:
        repeat: measured repetitions of each side of each case, at least 1; None: as many as the benchmark needs.
        link: the emulated link between the peers, e.g. "20mbit,150ms"; None: none is emulated.
        only: part of the names of the cases to measure; None: all cases.
        ignore_busy: measure even if other processes take the machine's cores.
    """

    repeat: int | None = None
    link: str | None = None
    only: str | None = None
    ignore_busy: bool = False

    def chooses(self, name: str) -> bool:
        """Whether the case of that name is to be measured."""
        return self.only is None or self.only in name


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes:
        name: reference, size and peers, e.g. "gloo 64 MB 2 peers".
        unit: of every value, e.g. "GB/s", "us", "s", "MB".
        ours: does one repetition and returns its value in `unit`.
        reference: the same for the comparison; None: there is none.
    """

    name: str
    unit: str
    ours: Callable[[], float]
    reference: Callable[[], float] | None

    @property
    def larger_is_better(self) -> bool:
        """Whether it is a rate or a share, and not a time, a size or a number."""
        return self.unit.endswith("/s") or self.unit == "%"
