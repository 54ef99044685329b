"""One replica's machine of stage 1 of 3 (or another), driven by hand."""

from __future__ import annotations

from shoal.ids import PeerId, StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Schedule, SendStepMessage, StepTotals
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.step import Backward, Forward, Open, StepMessage

T, U, A, B, C = PeerId("T"), PeerId("U"), PeerId("A"), PeerId("B"), PeerId("C")
PATH = tuple(Hop(peer, ()) for peer in (A, B, C))
KEY, OTHER = StepKey(0, 1, 0, 0), StepKey(1, 1, 0, 0)
TOTALS = StepTotals(2.0, True, None)
NUM = 2


def replica(
    stage: int = 1,
    max_open_steps: int = 2,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    room: int | None = None,
) -> StepReplica:
    machine = StepReplica(
        (A, B, C)[stage], stage=stage, num_stages=3, max_open_steps=max_open_steps, schedule=schedule, room=room
    )
    machine.start_round(1)
    return machine


def request(key: StepKey = KEY, round: int = 1, path: tuple[Hop, ...] = PATH) -> Open:
    return Open(key, round, path, (2,) * NUM, (2,) * NUM, (SampleRange(0, 0, 4),))


def run(machine: StepReplica) -> list[SendStepMessage]:
    """Runs operations until none is ready."""
    sends: list[SendStepMessage] = []
    while (operation := choose(machine.ready())) is not None:
        machine.started(operation)
        step = machine.open.get(operation.key)
        completes = step is not None and step.completes(operation)
        sends += machine.finished(operation, TOTALS if completes else None)
    return sends


def begun(machine: StepReplica, key: StepKey = KEY, trainer: PeerId = T) -> None:
    machine.receive(trainer, request(key), 0.0)
    machine.receive(A, Forward(key, 0), 0.0)
    run(machine)


def prepared(machine: StepReplica, key: StepKey = KEY, trainer: PeerId = T, round: int = 1) -> list[SendStepMessage]:
    machine.receive(trainer, request(key, round), 0.0)
    for microbatch in range(NUM):
        machine.receive(A, Forward(key, microbatch), 0.0)
    run(machine)
    for microbatch in range(NUM):
        machine.receive(C, Backward(key, microbatch), 0.0)
    return run(machine)


def replies(sends: list[SendStepMessage], to: PeerId) -> list[StepMessage]:
    return [send.message for send in sends if send.to == to]
