"""A pipeline of real processes, and what its devices did in some steps: busy by kind, and the bubble beside theory."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from shoal.swarm.step_operations import OperationKind, Schedule
from shoal_lab.bench.peers import PeerProcesses
from shoal_lab.bench.stage_peer import PipelineSpec


@dataclass(frozen=True, slots=True)
class StageUse:
    """What the device of one stage did.

    Attributes:
        busy_s: by kind of operation.
        open_s: how long a step was open there.
    """

    busy_s: Mapping[OperationKind, float]
    open_s: float

    @property
    def total_s(self) -> float:
        """The time in which the device worked."""
        return sum(self.busy_s.values())


@dataclass(frozen=True, slots=True)
class PipelineUse:
    """What a pipeline did in some steps.

    Attributes:
        wall_s: from the first step's start to the last one's commit.
        stages: in order.
    """

    wall_s: float
    stages: tuple[StageUse, ...]

    @property
    def bubble(self) -> float:
        """The share of the time in which devices had nothing to do, commits included, the mean over the stages."""
        return 1.0 - sum(stage.total_s for stage in self.stages) / len(self.stages) / self.wall_s


class BenchmarkPipeline:
    """Processes of one trainer and one replica for each stage."""

    def __init__(self, peers: PeerProcesses, num_stages: int) -> None:
        self._peers = peers
        self._num_stages = num_stages

    def train(self, num_steps: int) -> PipelineUse:
        """Train some steps and return what they have taken."""
        before = self._uses()
        wall_s = self._peers.call("train", num_steps)[0]
        stages = tuple(_minus(after, earlier) for after, earlier in zip(self._uses(), before, strict=True))
        return PipelineUse(wall_s, stages)

    def _uses(self) -> list[StageUse]:
        counts: list[Mapping[str, int]] = self._peers.call("counts")[1:]
        return [_use(of_stage, stage) for stage, of_stage in enumerate(counts)]


@contextmanager
def open_pipeline(spec: PipelineSpec, num_stages: int) -> Generator[BenchmarkPipeline, None, None]:
    """Start a pipeline; `spec.folder` is chosen here."""
    with tempfile.TemporaryDirectory(prefix="shoal-stages-") as folder:
        arguments = msgspec.to_builtins(msgspec.structs.replace(spec, folder=folder))
        with PeerProcesses("shoal_lab.bench.stage_peer:main", num_stages + 1, arguments) as peers:
            yield BenchmarkPipeline(peers, num_stages)


def theory(spec: PipelineSpec, num_stages: int) -> float:
    """Return the bubble that a schedule has at best on the emulated devices; with equal times where there are none."""
    pace = spec.pace
    times_s = (pace.forward_s, pace.input_gradient_s, pace.weight_gradient_s) if pace is not None else (1.0, 1.0, 1.0)
    return bubble_of(Schedule(spec.schedule), num_stages, spec.microbatches, *times_s)


def _use(counts: Mapping[str, int], stage: int) -> StageUse:
    busy_s = {
        kind: counts.get(f"device.busy_us{{kind={kind.name.lower()},stage={stage}}}", 0) / 1e6 for kind in OperationKind
    }
    return StageUse(busy_s, counts.get(f"device.open_us{{stage={stage}}}", 0) / 1e6)


def _minus(after: StageUse, before: StageUse) -> StageUse:
    busy_s = {kind: busy_s - before.busy_s[kind] for kind, busy_s in after.busy_s.items()}
    return replace(after, busy_s=busy_s, open_s=after.open_s - before.open_s)


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
