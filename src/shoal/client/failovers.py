"""What broke while the run went on, and how long it took until the trainers that it hit went on committing steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Failover:
    kind: str
    at_s: float
    waiting: set[int]
    recovered_after_s: float | None = None


@dataclass
class Failovers:
    """Losses in the order in which they were noticed; times are seconds since the run's launch."""

    _all: list[_Failover] = field(default_factory=list[_Failover])

    def lost(self, kind: str, slots: Iterable[int], now_s: float) -> None:
        """A process of this kind ended and these trainers' steps depended on it."""
        waiting = set(slots)
        self._all.append(_Failover(kind, now_s, waiting, None if waiting else 0.0))

    def is_known(self, kind: str, at_s: float, within_s: float) -> bool:
        """Whether a loss of this kind was noticed at about that time."""
        return any(each.kind == kind and abs(each.at_s - at_s) <= within_s for each in self._all)

    def step_committed(self, slot: int, now_s: float) -> None:
        """A trainer has committed a step at that time, of which this client may hear later."""
        for failover in self._all:
            if slot in failover.waiting and now_s >= failover.at_s:
                failover.waiting.discard(slot)
                if not failover.waiting:
                    failover.recovered_after_s = now_s - failover.at_s

    def as_json(self) -> list[dict[str, Any]]:
        """As `summary.json` has them; `recovered_after_s` is null where no step followed."""
        return [
            {
                "kind": each.kind,
                "at_s": round(each.at_s, 3),
                "recovered_after_s": None if each.recovered_after_s is None else round(each.recovered_after_s, 3),
            }
            for each in self._all
        ]
