"""Which of the ready operations the device runs next: backward first.

A replica that always prefers a ready backward holds as few activations as it can; with a bounded number of microbatches
in flight, one forward, one backward (1F1B) arises without a clock:

    stage 0   F0 F1 F2    B0 F3 B1 ...
    stage 1      F0 F1 B0 F2 B1 ...
    stage 2         L0 L1 L2 ...            L = forward, loss and backward in one
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.swarm.step_operations import Operation, OperationKind, Ready


def choose(ready: Iterable[Ready]) -> Operation | None:
    """The next operation, or None if nothing is ready.

    Drops come first (they free memory), then commits, then what ends in a backward, then forwards; among equals a step
    that has begun before one that has not (it holds up commits), then the one opened first, then the lower microbatch.
    """
    best = min(ready, key=_rank, default=None)
    return None if best is None else best.operation


def _rank(ready: Ready) -> tuple[OperationKind, bool, int, int]:
    return ready.operation.kind, not ready.begun, ready.opened, ready.operation.microbatch
