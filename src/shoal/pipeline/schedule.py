"""Which of the ready operations the device runs next.

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

from shoal.swarm.step_operations import Operation, OperationKind, ReadyOperation


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
