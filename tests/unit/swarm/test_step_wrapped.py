"""A wrapped step: the first replica of the path has the head as well, and takes part once."""

from __future__ import annotations

import pytest
from tests.unit.swarm.step_by_hand import KEY, NUM, A, B, C, T, request, run

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Operation, OperationKind, Schedule, SendStepMessage
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.step import (
    Backward,
    Broken,
    Commit,
    Committed,
    Forward,
    Labels,
    MicrobatchDone,
    Opened,
    Prepared,
)


def replica(stage: int, schedule: Schedule = Schedule.ONE_F_ONE_B) -> StepReplica:
    machine = StepReplica(
        (A, B, C)[stage], stage=stage, num_stages=3, max_open_steps=2, schedule=schedule, is_wrapped=True
    )
    machine.start_round(1)
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Opened(KEY))]
    return machine


def first_has_its_inputs(schedule: Schedule = Schedule.ONE_F_ONE_B) -> StepReplica:
    """The first stage, with all inputs and labels, whose own units have done all forwards."""
    machine = replica(0, schedule)
    for microbatch in range(NUM):
        machine.receive(T, Forward(KEY, microbatch), 0.0)
        machine.receive(T, Labels(KEY, microbatch), 0.0)
    assert run(machine) == [SendStepMessage(B, Forward(KEY, microbatch)) for microbatch in range(NUM)]
    return machine


def test_the_last_stage_sends_its_output_to_the_first_one_and_gets_the_gradient_from_there() -> None:
    machine = replica(2)
    machine.receive(B, Forward(KEY, 0), 0.0)
    assert run(machine) == [SendStepMessage(A, Forward(KEY, 0))]
    machine.receive(A, Backward(KEY, 0), 0.0)
    assert run(machine) == [SendStepMessage(B, Backward(KEY, 0))]
    with pytest.raises(RemoteProtocolError):
        machine.receive(T, Labels(KEY, 0), 0.0)


def test_who_sends_an_input_to_the_first_stage_says_which_part_of_it_is_meant() -> None:
    machine = replica(0)
    own = machine.wanted_by(T, Forward(KEY, 0))
    head = machine.wanted_by(C, Forward(KEY, 0))
    assert own is not None
    assert head is not None
    assert (own.is_head, head.is_head) == (False, True)
    assert machine.wanted_by(B, Forward(KEY, 0)) is None
    with pytest.raises(RemoteProtocolError):
        machine.receive(B, Forward(KEY, 0), 0.0)
    with pytest.raises(RemoteProtocolError):
        machine.receive(C, Backward(KEY, 0), 0.0)


def test_the_head_computes_the_loss_and_the_own_units_go_back_when_the_gradient_has_come_all_the_way() -> None:
    machine = first_has_its_inputs()
    machine.receive(C, Forward(KEY, 0), 0.0)
    assert choose(machine.ready()) == Operation(OperationKind.LOSS, KEY, 0, is_head=True)
    assert run(machine) == [SendStepMessage(C, Backward(KEY, 0))]
    machine.receive(B, Backward(KEY, 0), 0.0)
    assert choose(machine.ready()) == Operation(OperationKind.BACKWARD, KEY, 0)
    assert run(machine) == [SendStepMessage(T, MicrobatchDone(KEY, 0))]


@pytest.mark.parametrize("schedule", Schedule)
def test_a_replica_is_prepared_once_when_both_parts_have_all_gradients(schedule: Schedule) -> None:
    machine = first_has_its_inputs(schedule)
    for microbatch in range(NUM):
        machine.receive(C, Forward(KEY, microbatch), 0.0)
    sent = run(machine)
    assert sent == [SendStepMessage(C, Backward(KEY, microbatch)) for microbatch in range(NUM)]
    machine.receive(B, Backward(KEY, 0), 0.0)
    assert run(machine) == [SendStepMessage(T, MicrobatchDone(KEY, 0))]
    machine.receive(B, Backward(KEY, 1), 0.0)
    sent = [send.message for send in run(machine)]
    assert [type(message) for message in sent] == [MicrobatchDone, Prepared]
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    assert run(machine) == [SendStepMessage(T, Committed(KEY))]


def test_what_comes_again_is_answered_by_the_part_that_it_is_for() -> None:
    machine = first_has_its_inputs()
    machine.receive(C, Forward(KEY, 0), 0.0)
    run(machine)
    machine.receive(B, Backward(KEY, 0), 0.0)
    run(machine)
    assert machine.receive(C, Forward(KEY, 0), 0.0) == [SendStepMessage(C, Backward(KEY, 0))]
    assert machine.receive(B, Backward(KEY, 0), 0.0) == [SendStepMessage(T, MicrobatchDone(KEY, 0))]
    assert machine.ready() == []


@pytest.mark.parametrize(("stage", "lost"), [(0, B), (0, C), (2, A), (2, B)])
def test_a_neighbour_on_either_side_of_either_part_is_missed(stage: int, lost: PeerId) -> None:
    assert replica(stage).lost(lost, 0.0) == [SendStepMessage(T, Broken(KEY, lost))]


def test_a_stage_in_the_middle_has_no_third_neighbour() -> None:
    assert [type(send.message) for peer in (A, C) for send in replica(1).lost(peer, 0.0)] == [Broken, Broken]
    assert replica(1).lost(PeerId("D"), 0.0) == []
