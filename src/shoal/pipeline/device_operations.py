"""One operation of a step, or a batch of an evaluation, on the device: computed on its thread, and timed.

begin -> device thread -> Computed -> last -> the next operation may begin
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.clock import Clock
from shoal.codec.raw import from_wire, to_wire
from shoal.data.targets import targets_of
from shoal.pipeline.device_meter import DeviceMeter
from shoal.pipeline.stage_compute import StageCompute
from shoal.runtime.device_thread import DeviceThread
from shoal.swarm.microbatch_cut import weight_of
from shoal.swarm.step_operations import Operation, OperationKind, StepTotals
from shoal.wire.messages.step import Open
from shoal.wire.tensors import WireTensor


@dataclass(frozen=True, slots=True)
class Computed:
    """What an operation gave; when it began and how long the computation took."""

    tensor: WireTensor | None
    totals: StepTotals | None
    begun_s: float
    took_s: float


class Operations(Protocol):
    """What has a device compute; called on the replica's event loop."""

    @property
    def compute(self) -> StageCompute:
        """What computes, on the device's thread."""
        ...

    def begin(
        self, operation: Operation, inputs: list[WireTensor], request: Open | None, *, completes: bool
    ) -> Awaitable[Computed]:
        """Give an operation to the device at once. The returned awaitable waits for it, and raises what it raises.

        Args:
            request: What opened the step; None: it is not open any more.
            completes: Whether the step is summed up after it.
        """
        ...

    async def last(self, operation: Operation, computed: Computed, request: Open | None) -> None:
        """Return when the next operation may begin."""
        ...

    async def evaluate(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        """Evaluate a batch; return its mean loss where there are labels, else the stage's output."""
        ...


class DeviceOperations:
    """Of one replica."""

    def __init__(self, compute: StageCompute, device: DeviceThread, meter: DeviceMeter, clock: Clock) -> None:
        """Compute nothing yet.

        Args:
            meter: Is told how long each operation took.
        """
        self.compute = compute
        self._device = device
        self._meter = meter
        self._clock = clock

    def begin(
        self, operation: Operation, inputs: list[WireTensor], request: Open | None, *, completes: bool
    ) -> Awaitable[Computed]:
        """Give an operation to the device."""
        targets = request.microbatch_targets if request is not None else ()
        loss_scale = request.loss_scale if request is not None else 1.0
        return self._device.begin(self._timed, operation, inputs, targets, loss_scale, completes)

    async def last(self, operation: Operation, computed: Computed, request: Open | None) -> None:
        """Count the time of a computed operation: the next one may begin at once."""
        self._meter.worked(operation.kind, computed.took_s)

    async def evaluate(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        """Have the device evaluate a batch."""
        return await self._device.run(self._evaluated, taken, labels)

    # ---- on the device thread

    def _evaluated(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        received, *context = map(from_wire, taken)
        if labels is None:
            return to_wire(self.compute.evaluate(received, None, *context))
        if not sum(targets_of(labels)):
            return 0.0
        return float(self.compute.evaluate(received, from_wire(labels), *context))

    def _timed(
        self,
        operation: Operation,
        inputs: list[WireTensor],
        targets: tuple[int, ...],
        loss_scale: float,
        completes: bool,
    ) -> Computed:
        begun_s = self._clock.now_s()
        tensor = operate(self.compute, operation, inputs, targets, loss_scale)
        totals = self.compute.totals(operation.key) if completes else None
        return Computed(tensor, totals, begun_s, self._clock.now_s() - begun_s)


def operate(
    compute: StageCompute,
    operation: Operation,
    inputs: list[WireTensor],
    targets: tuple[int, ...],
    loss_scale: float = 1.0,
) -> WireTensor | None:
    """Compute one operation; runs on the device thread.

    Args:
        inputs: Of a forward what the stage takes and the context, of a backward the gradient, of a loss the labels,
            behind those of a forward where none was done before.
        targets: Of each microbatch of the step.

    Returns:
        What the neighbour gets; None: it gets nothing.
    """
    key, microbatch, is_head = operation.key, operation.microbatch, operation.is_head
    module = compute.module.part(is_head=is_head)
    tensors = [from_wire(tensor) for tensor in inputs]
    match operation.kind:
        case OperationKind.DROP:
            compute.drop(key)
            return None
        case OperationKind.COMMIT:
            if operation.decision is not None:
                compute.commit(key, operation.decision.scale, operation.decision.lr, operation.decision.skipped)
            return None
        case OperationKind.FORWARD:
            weight = weight_of(targets, microbatch)
            output = compute.forward(
                key, microbatch, tensors[0], weight, *tensors[1:], is_head=is_head, loss_scale=loss_scale
            )
            # Nobody gets what the last stage puts out.
            return None if module.is_last else to_wire(output)
        case OperationKind.WEIGHTS:
            compute.weights(key, microbatch, is_head=is_head)
            return None
        case OperationKind.BACKWARD:
            gradient = compute.backward(key, microbatch, tensors[0])
        case OperationKind.LOSS:
            *taken, labels = tensors
            received, weight = taken[0] if taken else None, weight_of(targets, microbatch)
            gradient = compute.loss(key, microbatch, received, labels, weight, *taken[1:], loss_scale=loss_scale)
    return None if module.is_first else to_wire(gradient)
