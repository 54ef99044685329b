"""What the device does next, out of what it could do."""

from __future__ import annotations

from shoal.ids import StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Operation, OperationKind, ReadyOperation

OLD, NEW = StepKey(0, 1, 0, 0), StepKey(1, 1, 0, 0)


def ready(kind: OperationKind, key: StepKey = OLD, microbatch: int = 0, begun: bool = True) -> ReadyOperation:
    return ReadyOperation(Operation(kind, key, microbatch), begun, 0 if key == OLD else 1)


def test_nothing_ready_is_nothing_to_do() -> None:
    assert choose([]) is None


def test_drops_then_commits_then_backwards_then_forwards_then_weight_gradients() -> None:
    order = [
        OperationKind.DROP,
        OperationKind.COMMIT,
        OperationKind.BACKWARD,
        OperationKind.LOSS,
        OperationKind.FORWARD,
        OperationKind.WEIGHTS,
    ]
    left = [ready(kind, NEW if kind == OperationKind.DROP else OLD) for kind in reversed(order)]
    chosen: list[OperationKind] = []
    while (operation := choose(left)) is not None:
        chosen.append(operation.kind)
        left = [one for one in left if one.operation != operation]
    assert chosen == order


def test_a_begun_step_goes_before_one_that_has_not_begun_and_an_older_before_a_newer() -> None:
    forward = OperationKind.FORWARD
    assert choose([ready(forward, OLD, begun=False), ready(forward, NEW)]) == Operation(forward, NEW, 0)
    assert choose([ready(forward, NEW), ready(forward, OLD)]) == Operation(forward, OLD, 0)
