"""A device that is slower than the one that computes: for tests and benchmarks of schedules and of mixed machines.

What an operation lasts longer than its computation is waited for and not computed, so many emulated devices fit on one
core. The computation itself stays what it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.config.emulation import SampleTime
from shoal.pipeline.schedule import Parts


class DevicePace(msgspec.Struct, kw_only=True):
    """How long the operations of one replica last; its fields may be changed while the replica runs.

    Attributes:
        forward_s: The least that a forward lasts.
        input_gradient_s: The same of the part of a backward that gives the gradient of the input.
        weight_gradient_s: The same of the part that gives the gradients of the parameters.
        per_samples: The samples of an operation that lasts so long; others last in proportion. 0: any number.
        factor: How many times slower than this machine, or than the least times where those are longer, the device is.
        changes: From which operation of the replica on, counted from 0, `factor` is another one; ascending.
    """

    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    per_samples: int = 0
    factor: float = 1.0
    changes: tuple[tuple[int, float], ...] = ()

    def length_s(self, parts: Parts, took_s: float, number: int, num_samples: int) -> float:
        """Return how long an operation lasts.

        Args:
            parts: What it consists of.
            took_s: What this machine has taken.
            number: How many operations the replica has done before.
            num_samples: On which it was done.
        """
        factor = next((factor for first, factor in reversed(self.changes) if number >= first), self.factor)
        least_s = (
            parts.forwards * self.forward_s
            + parts.input_gradients * self.input_gradient_s
            + parts.weight_gradients * self.weight_gradient_s
        )
        share = num_samples / self.per_samples if self.per_samples else 1.0
        return max(took_s, least_s * share) * factor


def emulated_pace(call_s: float, sample_times: Sequence[SampleTime] = ()) -> DevicePace | None:
    """Return the pace of an emulated device; None if nothing is emulated.

    Args:
        call_s: What its forwards and backwards last.
        sample_times: What its forwards last for each sample instead, if any, by the order of its operations.
    """
    if sample_times:
        first, *later = sample_times
        changes = tuple((time.operation, time.seconds / first.seconds) for time in later)
        return DevicePace(forward_s=first.seconds, per_samples=1, changes=changes)
    half_s = call_s / 2
    return DevicePace(forward_s=call_s, input_gradient_s=half_s, weight_gradient_s=half_s) if call_s else None
