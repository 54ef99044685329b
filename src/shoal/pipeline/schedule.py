"""Which of the ready operations the device runs next, and how much of its time that fills at best.

No clock: a replica that always prefers a ready backward holds as few activations as it can, and with a bounded number
of microbatches in flight one forward, one backward (1F1B) arises by itself. F forward, B backward; where a backward is
split, B is the gradient of the input and W those of the parameters; L is forward, loss and backward in one.

    gpipe: all forwards first; the trainer sends all microbatches at once (Huang et al. 2019, arXiv:1811.06965)

        stage 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
        stage 1   .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. ..
        stage 2   .. .. F0 F1 F2 F3 L0 L0 L1 L1 L2 L2 L3 L3 .. .. .. ..

    1f1b: backward first (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503); as long, with fewer activations

        stage 0   F0 F1 F2 F3 .. .. .. B0 B0 .. B1 B1 .. B2 B2 .. B3 B3
        stage 1   .. F0 F1 F2 F3 B0 B0 .. B1 B1 .. B2 B2 .. B3 B3 .. ..
        stage 2   .. .. L0 L0 L0 L1 L1 L1 L2 L2 L2 L3 L3 L3 .. .. .. ..

    zero_bubble: backward first, W when nothing else is ready (Qi et al. 2023, arXiv:2401.10241). The first stage has no
    B: its W is the whole backward. Where too many activations are kept, W goes before what keeps more.

        stage 0   F0 F1 F2 F3 .. W0 W0 .. W1 W1 W2 W2 W3 W3
        stage 1   .. F0 F1 F2 B0 F3 W0 B1 W1 B2 W2 B3 W3 ..
        stage 2   .. .. L0 L0 L1 L1 L2 L2 L3 L3 W0 W1 W2 W3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.swarm.step_operations import Operation, OperationKind, ReadyOperation, Schedule


def choose(ready: Iterable[ReadyOperation], max_kept: int | None = None) -> Operation | None:
    """The next operation, or None if nothing is ready.

    Drops come first (they free memory), then commits, then what ends in a backward, then forwards, then weight
    gradients. Among equals, a step that has begun comes before one that has not (it holds up commits), then the step
    that was opened first, then the lower microbatch.

    Args:
        max_kept: How many microbatches of a step may be kept. At that number, its weight gradients, which free one,
            come before an operation that keeps another. None: any number.
    """
    best = min(ready, key=lambda one: _rank(one, max_kept), default=None)
    return None if best is None else best.operation


def _rank(ready: ReadyOperation, max_kept: int | None) -> tuple[OperationKind, bool, bool, int, int]:
    kind = ready.operation.kind
    frees = kind == OperationKind.WEIGHTS and max_kept is not None and ready.kept >= max_kept
    place = OperationKind.LOSS if frees else kind
    return place, not frees, not ready.begun, ready.opened, ready.operation.microbatch


class PassCounts(NamedTuple):
    """How many forwards, gradients of inputs and gradients of parameters an operation computes."""

    forwards: int = 0
    input_gradients: int = 0
    weight_gradients: int = 0


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


def bubble_of(
    schedule: Schedule, stages: int, microbatches: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    """The share of a step in which a device is idle, as the mean over the stages; 0 to 1.

    It is computed as in the schedules' papers: the same times in every stage, no time on the way, and enough
    microbatches in flight. A step is as long as its longest chain of operations.

    Args:
        stages: S.
        microbatches: M of a step.
        forward_s: Of one microbatch.
        input_s: For the gradient of its input.
        weight_s: For the gradients of the parameters.
    """
    work_s = forward_s + input_s + weight_s
    if schedule != Schedule.ZERO_BUBBLE:
        # Fill and drain: the last stage waits for the first forward, the first one for the last backward.
        return (stages - 1) / (microbatches + stages - 1) if work_s else 0.0
    fill_s = (stages - 1) * forward_s
    # Either the last stage is busy from its first input on, or the last gradient of an input travels all the way back.
    drain_s = microbatches * (forward_s + input_s) + (stages - 1) * input_s + weight_s
    step_s = fill_s + max(microbatches * work_s, drain_s)
    return 1.0 - microbatches * work_s / step_s if step_s else 0.0
