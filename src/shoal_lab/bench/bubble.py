"""The bubble of a pipeline in theory: how much of a step its devices have nothing to do."""

from __future__ import annotations

from shoal.swarm.step_operations import Schedule


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
