"""A forward of an evaluation lasts as long on an emulated device as one of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import anyio
import pytest
import torch
from tests.set_clock import SetClock

from shoal.codec.raw import to_wire
from shoal.pipeline.device_operations import Operations
from shoal.wire.tensors import WireTensor
from shoal_lab.emulation.device_pace import DevicePace
from shoal_lab.emulation.operations import PacedOperations

BATCH = to_wire(torch.ones(4, 2))


class _Sleeping(SetClock):
    async def sleep_s(self, duration_s: float) -> None:
        self.now += duration_s


class _Evaluating:
    """A device that takes a second for a batch."""

    def __init__(self, clock: _Sleeping) -> None:
        self._clock = clock

    async def evaluate(self, taken: Sequence[WireTensor], labels: WireTensor | None) -> WireTensor | float:
        self._clock.now += 1.0
        return 0.5 if labels is not None else taken[0]


@pytest.mark.parametrize(
    ("pace", "length_s"),
    [
        (DevicePace(forward_s=3.0), 3.0),
        (DevicePace(forward_s=3.0, per_samples=2), 6.0),
        (DevicePace(forward_s=0.5), 1.0),
    ],
    ids=["longer than it takes", "by sample", "shorter than it takes"],
)
def test_an_evaluated_batch_lasts_as_long_as_a_forward(pace: DevicePace, length_s: float) -> None:
    clock = _Sleeping(100.0)
    operations = PacedOperations(cast(Operations, _Evaluating(clock)), pace, clock)
    assert anyio.run(operations.evaluate, (BATCH,), BATCH) == 0.5
    assert clock.now - 100.0 == length_s
