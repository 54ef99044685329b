"""Whether the machine is free enough to measure: a loop on all cores at the same time has to get all of them.

Each core's loop first runs alone, in short slices. The speed that nine of ten slices stay below is the speed of an
undisturbed core, also on a machine where every core is shared, since a slice is shorter than a turn of the scheduler.
Then the loops run on all cores at the same time; what they do together, over that speed, is how many cores they got.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.clock import SystemClock
from shoal.errors import MachineBusy
from shoal.runtime.hardware import num_usable_cores
from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.bench.peers import PeerProcesses

ENOUGH = 0.8
"""Share of the cores that an idle machine gives at least; two idle virtual cores gave 0.91 to 0.95, one of them taken
by somebody else 0.57 to 0.73."""
_ATTEMPTS = 3
_LOOP_S = 0.2
_SLICE_LOOPS = 20_000
"""About 0.2 ms: shorter than a turn of the scheduler, long against reading the clock twice."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the loops got.

    Attributes:
        num_cores: how many loops ran at the same time, one for each core.
        cores_got: how many undisturbed cores would do as much as the loops did together.
    """

    num_cores: int
    cores_got: float

    @property
    def share(self) -> float:
        """What they got of what there is; about 1 on an idle machine."""
        return self.cores_got / self.num_cores

    @property
    def idle(self) -> bool:
        """Whether that is enough to measure."""
        return self.share >= ENOUGH


def cores_got(slice_rates: Sequence[float], rates_together: Sequence[float]) -> float:
    """Return how many undisturbed cores the loops got.

    Args:
        slice_rates: loops per second in each slice of a loop that ran alone.
        rates_together: loops per second of each loop when all ran at the same time.
    """
    undisturbed = sorted(slice_rates)[len(slice_rates) * 9 // 10]
    return sum(rates_together) / undisturbed


def calibrate() -> Calibration:
    """Measure what this machine gives now; of several attempts the best one counts, since a blip disturbs nobody."""
    num_cores = num_usable_cores()
    best = 0.0
    with PeerProcesses("shoal_lab.bench.busy:main", num_cores) as peers:
        for _ in range(_ATTEMPTS):
            slices = peers.call("alone", _LOOP_S)[0]
            best = max(best, cores_got(slices, peers.call("together", _LOOP_S)))
            if best >= ENOUGH * num_cores:
                break
    return Calibration(num_cores, best)


def require_idle(calibration: Calibration, when: str) -> None:
    """Check that a benchmark measures shoal and not what else the machine does.

    Args:
        when: "before the measurement" or "after the measurement".

    Raises:
        MachineBusy: the loops got too little; says how much.
    """
    if not calibration.idle:
        raise MachineBusy(
            f"the machine is too busy to measure: {when}, a loop on each of its {calibration.num_cores} cores got "
            f"{calibration.cores_got:.2f} cores ({calibration.share:.0%}; {ENOUGH:.0%} are needed)\n"
            "end what else runs, or say --ignore-busy for figures that do not count"
        )


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer the loop of one core, in a process of its own: alone, which only the first peer runs, and together."""

    def alone(duration_s: float) -> list[float]:
        return slice_rates(duration_s) if seat.index == 0 else []

    def together(duration_s: float) -> float:
        rates = slice_rates(duration_s)
        return len(rates) / sum(1 / rate for rate in rates)

    yield {"alone": alone, "together": together}


def slice_rates(duration_s: float) -> list[float]:
    """Loop for `duration_s` seconds; return the loops per second of each slice, and leave no time between slices."""
    clock = SystemClock()
    rates: list[float] = []
    now_s = clock.now_s()
    end_s = now_s + duration_s
    while now_s < end_s:
        for _ in range(_SLICE_LOOPS):
            pass
        before_s, now_s = now_s, clock.now_s()
        rates.append(_SLICE_LOOPS / (now_s - before_s))
    return rates
