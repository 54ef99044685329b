"""Operations of a replica's device that last as long as those of a slower one, or in the middle of which it dies."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from shoal.clock import Clock
from shoal.pipeline.device_operations import Computed, Operations
from shoal.pipeline.stage_compute import StageCompute
from shoal.swarm.step_operations import Operation, OperationKind
from shoal.wire.messages.step import Open
from shoal.wire.tensors import WireTensor
from shoal_lab.emulation.death_points import DeathPoints
from shoal_lab.emulation.device_pace import DevicePace, PassCounts, parts_of

_POINTS: Mapping[OperationKind, tuple[str, ...]] = {
    OperationKind.FORWARD: ("forward",),
    OperationKind.BACKWARD: ("backward",),
    OperationKind.LOSS: ("forward", "backward"),
    OperationKind.COMMIT: ("commit",),
}
"""Where a replica can die: in any microbatch but a step's first, so that something of the step is done."""


class _Decorated:
    """Operations as they are."""

    def __init__(self, plain: Operations) -> None:
        self._plain = plain

    @property
    def compute(self) -> StageCompute:
        return self._plain.compute

    def begin(
        self, operation: Operation, inputs: list[WireTensor], request: Open | None, *, completes: bool
    ) -> Awaitable[Computed]:
        return self._plain.begin(operation, inputs, request, completes=completes)

    async def last(self, operation: Operation, computed: Computed, request: Open | None) -> None:
        await self._plain.last(operation, computed, request)

    async def evaluate(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        return await self._plain.evaluate(taken, labels)


class PacedOperations(_Decorated):
    """Operations that last at least as long as on an emulated device; what they compute stays the same, to the bit."""

    def __init__(self, plain: Operations, pace: DevicePace, clock: Clock) -> None:
        super().__init__(plain)
        self._pace, self._clock = pace, clock
        self._num_operations = 0

    async def last(self, operation: Operation, computed: Computed, request: Open | None) -> None:
        """Wait for what the emulated device needs longer than this one."""
        parts = parts_of(
            operation.kind,
            self.compute.schedule,
            is_first=self.compute.module.is_first and not operation.is_head,
            recomputes=self.compute.activation_checkpointing,
        )
        num_samples = request.microbatch_samples[operation.microbatch] if request is not None else 0
        length_s = self._pace.length_s(parts, computed.took_s, self._num_operations, num_samples)
        self._num_operations += 1
        ended_s = await self._reached_s(computed.begun_s + length_s)
        await super().last(operation, replace(computed, took_s=ended_s - computed.begun_s), request)

    async def evaluate(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        """Wait for what the emulated device needs longer for a forward."""
        begun_s = self._clock.now_s()
        result = await super().evaluate(taken, labels)
        took_s, num_samples = self._clock.now_s() - begun_s, taken[0].shape[0]
        await self._reached_s(begun_s + self._pace.length_s(PassCounts(1), took_s, self._num_operations, num_samples))
        return result

    async def _reached_s(self, end_s: float) -> float:
        """Wait for a time; return when that was over."""
        # The event loop's own time lags a little behind, so that it may wake up too early.
        while (now_s := self._clock.now_s()) < end_s:
            await self._clock.sleep_s(end_s - now_s)
        return now_s


class MortalOperations(_Decorated):
    """Operations under which the process may die."""

    def __init__(self, plain: Operations, deaths: DeathPoints) -> None:
        super().__init__(plain)
        self._deaths = deaths

    def begin(
        self, operation: Operation, inputs: list[WireTensor], request: Open | None, *, completes: bool
    ) -> Awaitable[Computed]:
        """Give an operation to the device, and die while it computes if that was to be."""
        call = super().begin(operation, inputs, request, completes=completes)
        for point in _POINTS.get(operation.kind, ()) if operation.microbatch or request is None else ():
            self._deaths.reached(point, operation.key.number)
        return call
