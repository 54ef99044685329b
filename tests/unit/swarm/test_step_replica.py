"""The replica's machine, rule by rule: one replica of stage 1 of 3, driven by hand."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.unit.swarm.step_by_hand import KEY, NUM, OTHER, PATH, A, B, C, T, U, begun, prepared, replica, request, run

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.step_operations import Operation, OperationKind, Schedule, SendStepMessage
from shoal.wire.frame import encode_frame
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import (
    Abort,
    Aborted,
    AskOutcome,
    Backward,
    Broken,
    Busy,
    Commit,
    Committed,
    Forward,
    Labels,
    MicrobatchDone,
    Open,
    Opened,
    Outcome,
    Prepared,
    Refused,
    TellOutcome,
)


def test_tensors_go_to_the_neighbours_and_the_report_to_the_trainer() -> None:
    machine = replica()
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Opened(KEY))]
    machine.receive(A, Forward(KEY, 0), 0.0)
    assert run(machine) == [SendStepMessage(C, Forward(KEY, 0))]
    machine.receive(A, Forward(KEY, 1), 0.0)
    machine.receive(C, Backward(KEY, 0), 0.0)
    assert run(machine) == [SendStepMessage(A, Backward(KEY, 0)), SendStepMessage(C, Forward(KEY, 1))]  # backward first
    machine.receive(C, Backward(KEY, 1), 0.0)
    assert run(machine) == [
        SendStepMessage(A, Backward(KEY, 1)),
        SendStepMessage(T, Prepared(KEY, 1, 0, 2.0, True, None)),
    ]
    machine.receive(T, Commit(KEY, 0.5, 0.1, False), 0.0)
    assert run(machine) == [SendStepMessage(T, Committed(KEY))]
    [entry] = machine.log
    assert (entry.key, entry.path, entry.version, entry.num_samples) == (KEY, (A, B, C), 0, 4)
    assert (entry.scale, entry.lr, entry.skipped) == (0.5, 0.1, False)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
@pytest.mark.parametrize("is_computed", [False, True])
def test_of_a_step_no_more_microbatches_are_held_than_the_replica_says(schedule: Schedule, is_computed: bool) -> None:
    machine, sizes = replica(schedule=schedule, room=3), (1,) * 6
    opens = Open(KEY, 1, PATH, sizes, sizes, ())
    assert machine.receive(T, opens, 0.0) == machine.receive(T, opens, 0.0) == [SendStepMessage(T, Opened(KEY, 3))]
    for microbatch in (0, 1, 2, 2):
        assert machine.receive(A, Forward(KEY, microbatch), 0.0) == [], "again is not one more"
    run(machine)
    # One goes back, and another one may come; what is put off is the replica's own affair.
    machine.receive(C, Backward(KEY, 0), 0.0)
    if is_computed:
        run(machine)
        assert machine.receive(A, Forward(KEY, 3), 0.0) == []
        run(machine)
    assert machine.receive(A, Forward(KEY, 4), 0.0) == [SendStepMessage(T, Busy(KEY))]
    assert not machine.open
    assert choose(machine.ready()) == Operation(OperationKind.DROP, KEY), "what it held is free"
    run(machine)
    again = KEY._replace(attempt=1)
    assert machine.receive(T, msgspec.structs.replace(opens, key=again), 0.0) == [SendStepMessage(T, Opened(again, 3))]


def test_the_first_stage_reports_microbatches_and_the_last_needs_input_and_labels() -> None:
    first, last = replica(0), replica(2)
    first.receive(T, request(), 0.0)
    first.receive(T, Forward(KEY, 0), 0.0)
    assert run(first) == [SendStepMessage(B, Forward(KEY, 0))]
    first.receive(B, Backward(KEY, 0), 0.0)
    assert run(first) == [SendStepMessage(T, MicrobatchDone(KEY, 0))]
    last.receive(T, request(), 0.0)
    last.receive(B, Forward(KEY, 0), 0.0)
    assert run(last) == []
    last.receive(T, Labels(KEY, 0), 0.0)
    assert choose(last.ready()) == Operation(OperationKind.LOSS, KEY, 0)
    assert run(last) == [SendStepMessage(B, Backward(KEY, 0))]


def test_microbatches_run_in_order_however_they_arrive() -> None:
    machine = replica()
    machine.receive(T, request(), 0.0)
    machine.receive(A, Forward(KEY, 1), 0.0)
    assert run(machine) == []
    machine.receive(A, Forward(KEY, 0), 0.0)
    assert [send.message for send in run(machine)] == [Forward(KEY, 0), Forward(KEY, 1)]
    machine.receive(C, Backward(KEY, 1), 0.0)
    assert run(machine) == []


def test_a_repeated_backward_is_answered_again_and_not_added_again() -> None:
    machine = replica()
    begun(machine)
    machine.receive(C, Backward(KEY, 0), 0.0)
    run(machine)
    assert not machine.wanted_by(C, Backward(KEY, 0))
    assert machine.receive(C, Backward(KEY, 0), 0.0) == [SendStepMessage(A, Backward(KEY, 0))]
    assert machine.ready() == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (request(round=2), "behind"),
        (request(round=0), "closed"),
        (request(path=(PATH[0], PATH[2], PATH[1])), "malformed"),
        (request(path=PATH[:2]), "malformed"),
        (Open(KEY, 1, PATH, (), (), ()), "malformed"),
        (Open(KEY, 1, PATH, (2, 0), (2, 0), ()), "malformed"),
        (Open(KEY, 1, PATH, (2, 2), (2,), ()), "malformed"),
        (Open(KEY, 1, PATH, (2, 2), (2, -1), ()), "malformed"),
        (Open(KEY, 1, PATH, (2, 2), (2, 2), (), loss_scale=0.0), "malformed"),
    ],
)
def test_an_open_that_does_not_fit_is_refused(changed: Open, reason: str) -> None:
    assert replica().receive(T, changed, 0.0) == [SendStepMessage(T, Refused(KEY, reason))]


def test_an_attempt_that_was_aborted_is_never_opened_again() -> None:
    machine = replica()
    machine.receive(T, request(), 0.0)
    machine.receive(T, Abort(KEY), 0.0)
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Refused(KEY, "stale"))]
    assert machine.receive(T, request(KEY._replace(attempt=1)), 0.0) == [
        SendStepMessage(T, Opened(KEY._replace(attempt=1)))
    ]


def test_an_attempt_that_another_replica_was_told_is_forgotten_is_never_opened() -> None:
    machine = replica()
    assert machine.receive(A, AskOutcome(KEY), 0.0) == [SendStepMessage(A, TellOutcome(KEY, Outcome.FORGOTTEN))]
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Refused(KEY, "stale"))]


def test_a_step_that_would_make_the_log_too_long_to_join_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replica(max_open_steps=8)
    long = msgspec.structs.replace(
        request(), samples=tuple(SampleRange(1 << 32, 1 << 39, 1 << 40) for _ in range(10_000))
    )
    keys = [KEY._replace(number=number) for number in range(100)]
    committed = []
    for key in keys:
        [send] = machine.receive(T, msgspec.structs.replace(long, key=key), 0.0)
        if isinstance(send.message, Refused):
            break
        prepared(machine, key)
        machine.receive(T, Commit(key, 1.0, 0.1, False), 0.0)
        run(machine)
        committed.append(key)
    assert send.message == Refused(key, "closed")
    assert 40 < len(committed) < 60
    closed = StepsClosed(0, (), tuple(machine.log))
    assert encode_frame(closed.join(Ballot(1, T, 1), 1, 1, ())).num_bytes < 16 << 20
    machine.start_round(2)
    assert machine.receive(T, request(keys[-1], round=2), 0.0) == [SendStepMessage(T, Opened(keys[-1]))]


def test_a_repeated_open_is_answered_again_and_too_many_are_busy() -> None:
    machine = replica(max_open_steps=1)
    assert machine.receive(T, request(), 0.0) == machine.receive(T, request(), 0.0)
    assert machine.receive(U, request(OTHER), 0.0) == [SendStepMessage(U, Busy(OTHER))]
    machine.receive(T, Abort(KEY), 0.0)
    assert machine.receive(U, request(OTHER), 0.0) == [SendStepMessage(U, Opened(OTHER))]


NEXT = KEY._replace(number=1)


def test_the_next_step_of_a_trainer_begins_when_the_one_before_is_applied() -> None:
    machine = replica(max_open_steps=1)
    prepared(machine)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    assert machine.receive(T, request(NEXT), 0.0) == [SendStepMessage(T, Opened(NEXT))], "it needs no memory yet"
    machine.receive(A, Forward(NEXT, 0), 0.0)
    [commit] = machine.ready()
    assert commit.operation.kind == OperationKind.COMMIT
    machine.started(commit.operation)
    assert machine.finished(commit.operation, None) == [SendStepMessage(T, Committed(KEY))]
    assert run(machine) == [SendStepMessage(C, Forward(NEXT, 0))]


def test_while_another_step_holds_its_commit_up_a_trainer_s_next_step_waits_too_and_takes_no_place() -> None:
    machine = replica(max_open_steps=2)
    prepared(machine)
    begun(machine, OTHER, U)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    machine.receive(T, request(NEXT), 0.0)
    machine.receive(A, Forward(NEXT, 0), 0.0)
    assert machine.ready() == []
    third = StepKey(2, 1, 0, 0)
    assert machine.receive(PeerId("V"), request(third), 0.0) == [SendStepMessage(PeerId("V"), Busy(third))]
    machine.lost(U, 0.0)
    assert [send.message for send in run(machine)] == [Committed(KEY), Forward(NEXT, 0)]


def test_a_step_in_doubt_holds_up_no_later_one_of_its_trainer() -> None:
    machine = replica()
    prepared(machine)
    machine.lost(T, 0.0)
    machine.receive(T, request(NEXT), 0.0)
    machine.receive(A, Forward(NEXT, 0), 0.0)
    assert [send.message for send in run(machine)] == [Forward(NEXT, 0)]


def test_a_commit_waits_for_a_step_that_has_begun_but_not_for_one_that_has_not() -> None:
    machine = replica(max_open_steps=3)
    begun(machine, OTHER, U)
    machine.receive(PeerId("V"), request(StepKey(2, 1, 0, 0)), 0.0)
    prepared(machine)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    assert run(machine) == []
    machine.receive(A, Forward(OTHER, 1), 0.0)
    assert run(machine) == [SendStepMessage(C, Forward(OTHER, 1))]  # the waiting commit holds no microbatch up
    for microbatch in range(NUM):
        machine.receive(C, Backward(OTHER, microbatch), 0.0)
    assert SendStepMessage(T, Committed(KEY)) in run(machine)
    machine.receive(U, Commit(OTHER, 1.0, 0.1, False), 0.0)
    run(machine)
    assert [entry.version for entry in machine.log] == [0, 0]


def test_a_commit_is_answered_as_often_as_it_is_sent_also_in_the_next_round() -> None:
    machine = replica()
    prepared(machine)
    commit = Commit(KEY, 1.0, 0.1, False)
    machine.receive(T, commit, 0.0)
    run(machine)
    assert machine.receive(T, commit, 0.0) == [SendStepMessage(T, Committed(KEY))]
    machine.start_round(2)
    assert machine.receive(T, commit, 0.0) == [SendStepMessage(T, Committed(KEY))]
    assert machine.log == []
    machine.start_round(3)
    assert machine.receive(T, commit, 0.0) == [SendStepMessage(T, Aborted(KEY))]


def test_a_step_of_another_record_is_refused_though_its_round_has_the_number_of_this_one() -> None:
    machine = replica()
    machine.start_round(1, "a record")
    [refused] = machine.receive(T, request(OTHER), 0.0)
    assert refused == SendStepMessage(T, Refused(OTHER, "behind"))
    machine.start_round(1)
    assert machine.receive(T, request(OTHER), 0.0) == [SendStepMessage(T, Opened(OTHER))]


def test_a_decision_is_final() -> None:
    machine = replica(max_open_steps=2)
    begun(machine, OTHER, U)
    prepared(machine)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    machine.receive(T, Abort(KEY), 0.0)
    machine.lost(T, 0.0)
    assert machine.receive(A, AskOutcome(KEY), 0.0) == [
        SendStepMessage(A, TellOutcome(KEY, Outcome.COMMITTED, 1.0, 0.1, False))
    ]
    machine.receive(U, Abort(OTHER), 0.0)
    run(machine)
    assert [entry.key for entry in machine.log] == [KEY]


@pytest.mark.parametrize("commit", [Commit(KEY, float("nan"), 0.1, False), Commit(KEY, 1.0, -1.0, False)])
def test_a_commit_with_impossible_numbers_breaks_the_protocol(commit: Commit) -> None:
    machine = replica()
    prepared(machine)
    with pytest.raises(RemoteProtocolError):
        machine.receive(T, commit, 0.0)


def test_messages_of_the_wrong_peer_or_before_their_time_break_the_protocol() -> None:
    machine = replica()
    begun(machine)
    for sender, message in (
        (C, Forward(KEY, 1)),
        (A, Backward(KEY, 0)),
        (T, Labels(KEY, 0)),
        (A, Forward(KEY, NUM)),
        (T, Commit(KEY, 1.0, 0.1, False)),
        (T, Opened(KEY)),
    ):
        with pytest.raises(RemoteProtocolError):
            machine.receive(sender, message, 0.0)
    prepared_machine = replica()
    prepared(prepared_machine)
    with pytest.raises(RemoteProtocolError):
        prepared_machine.receive(A, Commit(KEY, 1.0, 0.1, False), 0.0)


def test_a_tensor_of_an_unknown_attempt_is_refused_and_one_of_an_aborted_attempt_is_not() -> None:
    machine = replica()
    assert machine.receive(A, Forward(KEY, 0), 0.0) == [SendStepMessage(A, Refused(KEY, "unknown"))]
    machine.receive(T, request(), 0.0)
    machine.receive(T, Abort(KEY), 0.0)
    assert machine.receive(A, Forward(KEY, 0), 0.0) == []


def test_a_refusal_or_loss_of_a_neighbour_is_reported_until_the_step_is_prepared() -> None:
    machine = replica()
    begun(machine)
    assert machine.receive(C, Refused(KEY, "unknown"), 0.0) == [SendStepMessage(T, Broken(KEY, C))]
    # Whoever is no neighbour gets nothing from it that it could refuse.
    first = replica(stage=0)
    first.receive(T, request(), 0.0)
    assert first.receive(C, Refused(KEY, "unknown"), 0.0) == []
    assert machine.lost(A, 0.0) == [SendStepMessage(T, Broken(KEY, A))]
    machine = replica()
    prepared(machine)
    assert machine.lost(A, 0.0) == machine.lost(C, 0.0) == []


def test_a_step_that_the_device_fails_on_is_refused() -> None:
    machine = replica()
    begun(machine)
    assert machine.refuse(KEY, "out of memory") == [SendStepMessage(T, Refused(KEY, "out of memory"))]
    assert machine.refuse(KEY, "again") == []


def test_a_refusal_carries_a_cap_that_was_lowered_and_so_does_that_of_the_next_open() -> None:
    machine = replica()
    begun(machine)
    machine.cap = 1
    assert machine.refuse(KEY, "out of memory") == [SendStepMessage(T, Refused(KEY, "out of memory", 1))]
    again = request(KEY._replace(attempt=KEY.attempt + 1))
    [send] = machine.receive(T, again, 0.0)
    assert isinstance(send.message, Refused)
    assert send.message.cap == 1


def test_results_of_an_attempt_that_was_aborted_meanwhile_are_thrown_away() -> None:
    machine = replica()
    machine.receive(T, request(), 0.0)
    machine.receive(A, Forward(KEY, 0), 0.0)
    operation = choose(machine.ready())
    assert operation is not None
    machine.started(operation)
    machine.receive(T, Abort(KEY), 0.0)
    assert machine.finished(operation, None) == []
    assert choose(machine.ready()) == Operation(OperationKind.DROP, KEY)


@pytest.mark.parametrize(
    "message", [Abort, lambda key: Commit(key, 1.0, 0.1, False), AskOutcome], ids=["Abort", "Commit", "AskOutcome"]
)
def test_what_somebody_says_of_attempts_that_are_not_his_makes_none_stale(message: Callable[[StepKey], object]) -> None:
    machine, huge = replica(), StepKey(KEY.trainer, 1 << 62, 1 << 62, 1 << 62)
    for key in (huge, KEY._replace(attempt=1 << 62), KEY._replace(number=1 << 62)):
        machine.receive(U, message(key), 0.0)  # type: ignore[arg-type]
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Opened(KEY))]


@pytest.mark.parametrize("message", [Abort(KEY), Commit(KEY, 1.0, 0.1, False)])
def test_what_a_trainer_has_ended_before_it_came_is_never_opened(message: Abort | Commit) -> None:
    machine = replica()
    machine.receive(T, message, 0.0)
    assert machine.receive(T, request(), 0.0) == [SendStepMessage(T, Refused(KEY, "stale"))]
    later = KEY._replace(attempt=1)
    assert machine.receive(T, request(later), 0.0) == [SendStepMessage(T, Opened(later))]


def test_what_is_remembered_of_attempts_that_were_never_opened_goes_with_who_has_spoken_of_them() -> None:
    machine = replica()
    for number in range(3):
        for peer in (PeerId(f"stranger {number}"), PeerId(f"another {number}")):
            machine.receive(peer, Abort(KEY._replace(number=number)), 0.0)
            machine.receive(peer, AskOutcome(KEY._replace(number=number)), 0.0)
            machine.lost(peer, 0.0)
    assert (machine._ledger._ended, machine._ledger._answered) == ({}, {KEY.trainer: {}})
