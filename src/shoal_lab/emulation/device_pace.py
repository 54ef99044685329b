"""A device that is slower than the one that computes: for tests and benchmarks of schedules and of mixed machines.

What an operation lasts longer than its computation is waited for and not computed, so many emulated devices fit on one
core. The computation itself stays what it is, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.config.emulation import SampleTime
from shoal.swarm.step_operations import OperationKind, Schedule


class PassCounts(NamedTuple):
    """How many forwards, gradients of inputs and gradients of parameters an operation computes."""

    forwards: int = 0
    input_gradients: int = 0
    weight_gradients: int = 0


class DevicePace(msgspec.Struct, kw_only=True):
    """How long the operations of one replica last; its fields may be changed while the replica runs.

    Attributes:
        forward_s: The least that a forward lasts.
        input_gradient_s: The least that the part of a backward lasts which computes the input's gradient.
        weight_gradient_s: The least that the part lasts which computes the parameters' gradients.
        per_samples: The least times hold for this number of samples, and grow in proportion. 0: for any.
        factor: How many times slower the device is than this machine, or than the least times where those are longer.
        changes: Pairs of an operation's number, counted from 0, and the `factor` that holds from it on; ascending.
    """

    forward_s: float = 0.0
    input_gradient_s: float = 0.0
    weight_gradient_s: float = 0.0
    per_samples: int = 0
    factor: float = 1.0
    changes: tuple[tuple[int, float], ...] = ()

    def length_s(self, parts: PassCounts, took_s: float, number: int, num_samples: int) -> float:
        """Return how long an operation lasts.

        Args:
            took_s: What this machine has taken for it.
            number: How many operations the replica has done before.
        """
        factor = next((factor for first, factor in reversed(self.changes) if number >= first), self.factor)
        least_s = (
            parts.forwards * self.forward_s
            + parts.input_gradients * self.input_gradient_s
            + parts.weight_gradients * self.weight_gradient_s
        )
        share = num_samples / self.per_samples if self.per_samples else 1.0
        return max(took_s, least_s * share) * factor


def emulated_pace(call_s: float, sample_times: Sequence[SampleTime]) -> DevicePace | None:
    """Return the pace of an emulated device; None if nothing is emulated.

    Args:
        call_s: What each forward and each backward lasts.
        sample_times: What forwards last for each sample instead, ordered by the operation from which each holds; empty:
            `call_s` holds.
    """
    if sample_times:
        first, *later = sample_times
        changes = tuple((time.operation, time.seconds / first.seconds) for time in later)
        return DevicePace(forward_s=first.seconds, per_samples=1, changes=changes)
    half_s = call_s / 2
    return DevicePace(forward_s=call_s, input_gradient_s=half_s, weight_gradient_s=half_s) if call_s else None


def parts_of(kind: OperationKind, schedule: Schedule, *, is_first: bool, recomputes: bool = False) -> PassCounts:
    """What an operation consists of; a whole backward counts as both of its gradients, also where one is not needed.

    Args:
        recomputes: Whether a backward computes the activations of its forward again.
    """
    splits, done_before = schedule == Schedule.ZERO_BUBBLE, schedule == Schedule.GPIPE
    match kind:
        case OperationKind.FORWARD:
            return PassCounts(1)
        case OperationKind.WEIGHTS:
            return PassCounts(0, int(is_first), 1)
        case OperationKind.BACKWARD | OperationKind.LOSS:
            is_loss = kind == OperationKind.LOSS
            forwards = int(is_loss and not done_before) + int(recomputes and (done_before or not is_loss))
            return PassCounts(forwards, int(not (splits and is_first)), int(not splits))
        case _:
            return PassCounts()
