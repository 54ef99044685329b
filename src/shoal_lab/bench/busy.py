"""Whether the machine is free enough to measure: a loop on all cores at the same time has to get all of them.

Each core's loop first runs alone, in short slices. The speed that nine of ten slices stay below is the speed of an
undisturbed core, also on a machine where every core is shared, since a slice is shorter than a turn of the scheduler.
Then the loops run on all cores at the same time; what they do together, over that speed, is how many cores they got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import MachineBusy
from shoal.runtime.hardware import num_usable_cores
from shoal_lab.bench.peers import PeerProcesses

ENOUGH = 0.8
"""Share of the cores that an idle machine gives at least; two idle virtual cores gave 0.91 to 0.95, one of them taken
by somebody else 0.57 to 0.73."""
_ATTEMPTS = 3
_LOOP_S = 0.2


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
    with PeerProcesses("shoal_lab.bench.busy_peer:main", num_cores) as peers:
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
