"""A pipeline of real processes on emulated devices: what its benchmark measures is what happened."""

from __future__ import annotations

import pytest

from shoal.swarm.step_operations import OperationKind
from shoal_lab.bench.stage_peer import PipelineSpec
from shoal_lab.bench.stages import PipelineUse, StageUse, open_pipeline, theory
from shoal_lab.emulation.device_pace import DevicePace

pytestmark = pytest.mark.slow

PACE = DevicePace(forward_s=0.002, input_gradient_s=0.002, weight_gradient_s=0.002)


def test_busy_times_are_at_least_what_the_devices_are_told() -> None:
    spec = PipelineSpec(folder="", schedule="zero_bubble", microbatches=3, blocks=2, pace=PACE)
    with open_pipeline(spec, 2) as pipeline:
        uses = [pipeline.train(2), pipeline.train(1)]
    for use, num_steps in zip(uses, (2, 1), strict=True):
        least_s = 3 * num_steps * 0.002 - 1e-6
        first, last = (stage.busy_s for stage in use.stages)
        # The first stage's weights are its whole backward, the last one's loss has its forward.
        assert first[OperationKind.FORWARD] >= least_s
        assert first[OperationKind.WEIGHTS] >= 2 * least_s
        assert last[OperationKind.LOSS] >= 2 * least_s
        assert last[OperationKind.WEIGHTS] >= least_s
        assert all(stage.busy_s[OperationKind.COMMIT] > 0 for stage in use.stages)
        assert all(stage.total_s <= use.wall_s for stage in use.stages)
        assert 0 <= use.bubble < 1


def test_the_bubble_is_the_mean_of_what_is_not_busy() -> None:
    uses = [StageUse({OperationKind.FORWARD: busy_s, OperationKind.COMMIT: 0.5}, 4.0) for busy_s in (1.5, 2.5)]
    assert PipelineUse(5.0, tuple(uses)).bubble == pytest.approx(0.5)
    assert theory(PipelineSpec(folder="", schedule="zero_bubble", pace=PACE), 4) == pytest.approx(3 / 27)
    assert theory(PipelineSpec(folder="", schedule="1f1b"), 4) == pytest.approx(3 / 11)
