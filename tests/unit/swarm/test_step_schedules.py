"""What a replica does next with each schedule, and when it is prepared."""

from __future__ import annotations

import pytest
from tests.unit.swarm.step_by_hand import KEY, NUM, TOTALS, A, B, C, T, begun, prepared, replica, replies, request, run

from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Decision, Operation, OperationKind, Schedule
from shoal.swarm.step_replica import StepReplica
from shoal.wire.messages.step import Abort, AskOutcome, Backward, Commit, Forward, Labels, Prepared, TellOutcome

FORWARD, BACKWARD, LOSS, WEIGHTS = (
    OperationKind.FORWARD,
    OperationKind.BACKWARD,
    OperationKind.LOSS,
    OperationKind.WEIGHTS,
)


def do(machine: StepReplica, kind: OperationKind, microbatch: int) -> list[object]:
    """One operation, which must be the one that is chosen; what is sent."""
    operation = choose(machine.ready())
    assert operation == Operation(kind, KEY, microbatch)
    machine.started(operation)
    totals = TOTALS if machine.open[KEY].completes(operation) else None
    return [send.message for send in machine.finished(operation, totals)]


def split(stage: int = 1) -> StepReplica:
    return replica(stage, schedule=Schedule.ZERO_BUBBLE)


def test_zero_bubble_sends_the_gradient_first_and_is_prepared_with_the_last_weights() -> None:
    machine = split()
    begun(machine)
    machine.receive(C, Backward(KEY, 0), 0.0)
    assert do(machine, BACKWARD, 0) == [Backward(KEY, 0)]
    machine.receive(A, Forward(KEY, 1), 0.0)
    assert do(machine, FORWARD, 1) == [Forward(KEY, 1)]
    assert do(machine, WEIGHTS, 0) == []
    machine.receive(C, Backward(KEY, 1), 0.0)
    assert do(machine, BACKWARD, 1) == [Backward(KEY, 1)]
    assert not machine.open[KEY].prepared
    assert do(machine, WEIGHTS, 1) == [Prepared(KEY, 1, 0, 2.0, True, None)]
    assert machine.open[KEY].prepared
    assert machine.ready() == []


def test_the_last_stage_of_zero_bubble_does_all_losses_before_weights() -> None:
    machine = split(2)
    machine.receive(T, request(), 0.0)
    for microbatch in range(NUM):
        machine.receive(B, Forward(KEY, microbatch), 0.0)
        machine.receive(T, Labels(KEY, microbatch), 0.0)
    assert [do(machine, LOSS, m) for m in range(NUM)] == [[Backward(KEY, m)] for m in range(NUM)]
    do(machine, WEIGHTS, 0)
    assert do(machine, WEIGHTS, 1) == [Prepared(KEY, 2, 0, 2.0, True, None)]


def test_weights_go_first_where_too_many_microbatches_are_kept() -> None:
    machine = split()
    begun(machine)
    machine.receive(C, Backward(KEY, 0), 0.0)
    do(machine, BACKWARD, 0)
    machine.receive(A, Forward(KEY, 1), 0.0)
    assert choose(machine.ready(), 2) == Operation(FORWARD, KEY, 1)
    assert choose(machine.ready(), 1) == Operation(WEIGHTS, KEY, 0)
    do(machine, FORWARD, 1)
    machine.receive(C, Backward(KEY, 1), 0.0)
    # A gradient that somebody waits for keeps nothing more.
    assert choose(machine.ready(), 1) == Operation(BACKWARD, KEY, 1)


def test_a_repeated_backward_is_answered_before_and_after_its_weights_and_adds_nothing() -> None:
    machine = split()
    begun(machine)
    machine.receive(C, Backward(KEY, 0), 0.0)
    do(machine, BACKWARD, 0)
    assert replies(machine.receive(C, Backward(KEY, 0), 0.0), A) == [Backward(KEY, 0)]
    do(machine, WEIGHTS, 0)
    assert replies(machine.receive(C, Backward(KEY, 0), 0.0), A) == [Backward(KEY, 0)]
    assert machine.ready() == []


def test_a_step_without_all_its_weights_holds_up_a_commit_and_aborts_alone() -> None:
    machine = split()
    begun(machine)
    for microbatch in range(NUM):
        machine.receive(A, Forward(KEY, microbatch), 0.0)
        machine.receive(C, Backward(KEY, microbatch), 0.0)
    do(machine, BACKWARD, 0)
    do(machine, FORWARD, 1)
    do(machine, BACKWARD, 1)
    other = KEY._replace(trainer=1)
    machine.open[other] = machine.open[KEY].__class__(request(other), T, 1, 1, Schedule.ZERO_BUBBLE)
    machine.open[other].prepared, machine.open[other].decision = True, Decision(1.0, 0.1, False)
    assert OperationKind.COMMIT not in [one.operation.kind for one in machine.ready()]
    machine.receive(T, Abort(KEY), 0.0)
    kinds = [one.operation.kind for one in machine.ready()]
    assert kinds == [OperationKind.DROP, OperationKind.COMMIT]


def test_a_step_that_waits_for_weights_answers_the_settlement_as_one_that_is_not_prepared() -> None:
    machine = split()
    begun(machine)
    machine.receive(C, Backward(KEY, 0), 0.0)
    do(machine, BACKWARD, 0)
    [told] = replies(machine.receive(A, AskOutcome(KEY), 0.0), A)
    assert isinstance(told, TellOutcome)
    assert told.outcome == "aborted"
    assert KEY not in machine.open


def test_closing_waits_for_the_weights_of_a_step_that_has_begun() -> None:
    machine = split()
    begun(machine)
    machine.close()
    machine.receive(A, Forward(KEY, 1), 0.0)
    for microbatch in range(NUM):
        machine.receive(C, Backward(KEY, microbatch), 0.0)
    assert replies(run(machine), T) == [Prepared(KEY, 1, 0, 2.0, True, None)]
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    run(machine)
    assert machine.closed


def test_gpipe_does_all_forwards_before_the_last_stage_begins_its_losses() -> None:
    machine = replica(2, schedule=Schedule.GPIPE)
    machine.receive(T, request(), 0.0)
    for microbatch in range(NUM):
        machine.receive(T, Labels(KEY, microbatch), 0.0)
    machine.receive(B, Forward(KEY, 0), 0.0)
    assert do(machine, FORWARD, 0) == []
    assert choose(machine.ready()) is None
    machine.receive(B, Forward(KEY, 1), 0.0)
    assert do(machine, FORWARD, 1) == []
    assert do(machine, LOSS, 0) == [Backward(KEY, 0)]
    assert do(machine, LOSS, 1) == [Backward(KEY, 1), Prepared(KEY, 2, 0, 2.0, True, None)]


@pytest.mark.parametrize("schedule", Schedule)
def test_every_schedule_prepares_a_stage_in_the_middle(schedule: Schedule) -> None:
    sends = prepared(replica(1, schedule=schedule))
    assert replies(sends, T) == [Prepared(KEY, 1, 0, 2.0, True, None)]
