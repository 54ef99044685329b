"""Steps of production's machines in emulated time: every operation and every message takes exactly what it is told."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.config.model import ModelPipelineConfig
from shoal.ids import PeerId
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Operation, Schedule, SendStepMessage, StepTotals
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import FeedMicrobatch, StepPlan, StepTrainer, TrainerEffect
from shoal.wire.messages.base import Hop, ReplicaRef, SampleRange
from shoal.wire.messages.step import Forward, Labels, StepMessage
from shoal_lab.emulation.device_pace import DevicePace, parts_of

TRAINER = PeerId("T")


@dataclass
class Emulated:
    """What some steps have come to.

    Attributes:
        length_s: From the first Open to the last commit.
        busy_s: Of each stage's device.
        ends_s: When each step ended.
        kept: The most microbatches that each stage kept.
        timeline: Of each stage: what it did from when to when.
    """

    length_s: float
    busy_s: list[float]
    kept: list[int]
    timeline: list[list[tuple[Operation, float, float]]]
    ends_s: list[float] = field(default_factory=list[float])

    @property
    def bubble(self) -> float:
        """The share of the time in which devices had nothing to do, the mean over the stages."""
        return 1.0 - sum(self.busy_s) / len(self.busy_s) / self.length_s


class Swarm:
    """One trainer and one replica for each stage."""

    def __init__(
        self,
        schedule: Schedule,
        stages: int,
        microbatches: int,
        pace: DevicePace,
        *,
        message_s: float,
        commit_s: float,
        line_s: float,
        room: int | None,
    ) -> None:
        flow = ModelPipelineConfig(stages=stages, schedule=schedule.value)
        self._schedule, self._pace, self._microbatches = schedule, pace, microbatches
        self._message_s, self._commit_s, self._line_s = message_s, commit_s, line_s
        self._max_kept = flow.microbatches_in_flight
        self._peers = [PeerId(f"R{stage}") for stage in range(stages)]
        self._replicas = {
            peer: StepReplica(peer, stage=stage, num_stages=stages, max_open_steps=1, schedule=schedule, room=room)
            for stage, peer in enumerate(self._peers)
        }
        self._trainer = StepTrainer(
            trainer=0, generation=1, window=flow.microbatches_in_flight, max_grad_norm=None, step_timeout_s=1e9
        )
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now_s = 0.0
        self._working: set[PeerId] = set()
        self._done = Emulated(0.0, [0.0] * stages, [0] * stages, [[] for _ in range(stages)])

    def train(self, num_steps: int) -> Emulated:
        for replica in self._replicas.values():
            replica.start_round(1)
        path = tuple(Hop(peer, ()) for peer in self._peers)
        for number in range(num_steps):
            sizes, samples = (1,) * self._microbatches, (SampleRange(0, 0, self._microbatches),)
            plan = StepPlan(
                1,
                number,
                tuple((1,) * size for size in sizes),
                samples,
                0.1,
                path,
                tuple((ReplicaRef(hop),) for hop in path),
            )
            self._effects(self._trainer.start(plan, self._now_s))
            while self._trainer.ended is None:
                self._now_s, _, call = heapq.heappop(self._queue)
                call()
            self._done.ends_s.append(self._now_s)
        self._done.length_s = self._now_s
        return self._done

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self._now_s + delay_s, self._count, call))

    def _post(self, sender: PeerId, to: PeerId, message: StepMessage) -> None:
        def arrive() -> None:
            if to == TRAINER:
                self._effects(self._trainer.receive(sender, message, self._now_s))
            else:
                self._sends(to, self._replicas[to].receive(sender, message, self._now_s))
                self._work(to)

        crosses = self._peers[-1] in (sender, to)
        self._after(self._message_s + (self._line_s if crosses else 0.0), arrive)

    def _effects(self, effects: Sequence[TrainerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendStepMessage(to, message):
                    self._post(TRAINER, to, message)
                case FeedMicrobatch(key, microbatch, _, inputs_to, labels_to):
                    self._post(TRAINER, inputs_to, Forward(key, microbatch))
                    self._post(TRAINER, labels_to, Labels(key, microbatch))
                case _:
                    pass

    def _sends(self, sender: PeerId, sends: Sequence[SendStepMessage]) -> None:
        for send in sends:
            self._post(sender, send.to, send.message)

    def _work(self, peer: PeerId) -> None:
        replica, stage = self._replicas[peer], self._peers.index(peer)
        operation = choose(replica.ready(), self._max_kept)
        if peer in self._working or operation is None:
            return
        self._working.add(peer)
        replica.started(operation)
        step = replica.open[operation.key]
        completes = step.completes(operation)
        parts = parts_of(operation.kind, self._schedule, is_first=stage == 0)
        length_s = self._commit_s if operation.decision is not None else self._pace.length_s(parts, 0.0, 0, 1)
        self._done.busy_s[stage] += length_s
        self._done.timeline[stage].append((operation, self._now_s, self._now_s + length_s))

        def finish() -> None:
            self._working.remove(peer)
            self._sends(peer, replica.finished(operation, StepTotals(1.0, True, 1.0) if completes else None))
            self._done.kept[stage] = max(
                self._done.kept[stage], sum(each.forwards - each.weights for each in step.passes)
            )
            self._work(peer)

        self._after(length_s, finish)


def emulate(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    times_s: tuple[float, float, float] = (1.0, 1.0, 1.0),
    *,
    num_steps: int = 1,
    message_s: float = 0.0,
    commit_s: float = 0.0,
    line_s: float = 0.0,
    room: int | None = None,
) -> Emulated:
    """Train some steps.

    Args:
        times_s: of a forward, of an input's gradient, of the parameters' gradients.
        line_s: that a message from or to the last stage takes in addition.
        room: microbatches of a step that each replica holds; None: any number.
    """
    pace = DevicePace(forward_s=times_s[0], input_gradient_s=times_s[1], weight_gradient_s=times_s[2])
    swarm = Swarm(
        schedule, stages, microbatches, pace, message_s=message_s, commit_s=commit_s, line_s=line_s, room=room
    )
    return swarm.train(num_steps)
