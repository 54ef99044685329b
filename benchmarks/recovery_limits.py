"""What deaths at chosen points have cost, and which limits that has not kept.

[Measured, ...] of a point or a role -> Result -> late, held_up -> lines for who reads the verdict
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal_lab.bench.busy import calibrate
from shoal_lab.bench.measure import percentile
from shoal_lab.faults.points import OF_TRANSFER


@dataclass(frozen=True)
class Limit:
    """How long something may take.

    Attributes:
        idle_s: on an idle machine.
        steps: so many usual steps on top, which have their share of the load already.
        least_s: with `--lenient` at least so long, in all.
    """

    idle_s: float
    steps: float
    least_s: float

    def seconds(self, step_s: float, times: float, *, lenient: bool) -> float:
        """Return it for a machine that takes so many times as long as an idle one, and `step_s` for a usual step."""
        limit_s = times * self.idle_s + self.steps * step_s
        return max(limit_s, self.least_s) if lenient else limit_s


LIMITS = {
    "server": (Limit(0.3, 2, 2.0), Limit(2.0, 2, 4.0)),
    "trainer": (Limit(3.0, 0, 4.5), Limit(3.0, 0, 4.5)),
    "data_server": (Limit(3.0, 0, 5.0), Limit(3.0, 0, 5.0)),
}
"""By role: of the median and of the 95th percentile, until the next step."""
WHOLE = Limit(8.0, 0, 15.0)
"""With a spare: until as many replicas serve as before."""
GAP_STEPS, LEAST_GAP_S = 1, 2.0
"""By so many usual steps a death in a transfer of state may make a step of others longer."""


@dataclass
class Measured:
    """One death.

    Attributes:
        death: as it was ordered.
        number: the step or round in which it happened.
        at_s: when it happened.
        seconds: for each trainer that was hit, from the death to the step that counts.
        whole_s: until the dead server has its state again, and each trainer a path of its own.
        gap_s: of a transfer: by how much the longest time between two steps of a round, of a trainer that was not hit,
            was longer than what its steps usually took since the death before, which made the transfer necessary.
    """

    death: str
    number: int
    at_s: float
    seconds: dict[int, float]
    whole_s: float | None = None
    gap_s: float | None = None


@dataclass
class Result:
    """All deaths at one point, or of one role at any of its points."""

    point: str
    deaths: list[Measured] = field(default_factory=list)

    @property
    def worst_s(self) -> list[float]:
        """Of each death, the trainer that waited longest."""
        return [max(death.seconds.values()) for death in self.deaths if death.seconds]

    @property
    def whole_s(self) -> list[float]:
        """Of each server, until it was back."""
        return [death.whole_s for death in self.deaths if death.whole_s is not None]

    @property
    def gap_s(self) -> list[float]:
        """Of each death, what it has added to a step of the others."""
        return [death.gap_s for death in self.deaths if death.gap_s is not None]


def late(result: Result, step_s: float, times: float, *, lenient: bool = False) -> list[str]:
    """Return which limits the deaths of a role have not kept, on a machine that takes so many times as long."""
    of_median, of_p95 = LIMITS[result.point.partition(",")[0]]
    judged: list[tuple[str, float, Limit]] = []
    if values := result.worst_s:
        judged.append(("median", statistics.median(values), of_median))
        judged.append(("p95", percentile(values, 0.95), of_p95))
    if result.whole_s:
        judged.append(("whole again: p95", percentile(result.whole_s, 0.95), WHOLE))
    return [
        f"{result.point}: {name} {value:.2f} s, the limit is {limit_s:.2f} s"
        for name, value, limit in judged
        if value > (limit_s := limit.seconds(step_s, times, lenient=lenient))
    ]


def held_up(result: Result, step_s: float, times: float, *, lenient: bool = False) -> list[str]:
    """Return whether deaths in a transfer of state have made a step of the others too long."""
    limit_s = Limit(0.0, times * GAP_STEPS, LEAST_GAP_S).seconds(step_s, times, lenient=lenient)
    longest_s = max(result.gap_s, default=0.0)
    if longest_s <= limit_s:
        return []
    return [f"{result.point}: a step of the others {longest_s:.2f} s longer, the limit is {limit_s:.2f} s"]


def by_role(results: Sequence[Result]) -> list[Result]:
    """Return the deaths of each role; without those of a donor, after which its stage may have nobody."""
    found: dict[str, Result] = {}
    for result in results:
        role, _, where = result.point.partition("@")
        if where not in OF_TRANSFER:
            found.setdefault(role, Result(f"{role}, any")).deaths.extend(result.deaths)
    return list(found.values())


def slowness() -> float:
    """Return how many times longer than on an idle machine something takes here now."""
    machine = calibrate()
    return 1.0 if machine.idle else 1.0 / machine.share
