"""A step without its trainer, and at the end of a round: who decides what, rule by rule."""

from __future__ import annotations

import pytest
from tests.unit.swarm.step_by_hand import KEY, OTHER, A, C, T, U, begun, prepared, replica, replies, request, run

from shoal.ids import PeerId, StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Decision, Operation, OperationKind, SendStepMessage
from shoal.wire.messages.step import (
    Aborted,
    AskOutcome,
    Backward,
    Commit,
    Fence,
    Fenced,
    Forward,
    Opened,
    Outcome,
    Refused,
    TellOutcome,
)


def test_without_its_trainer_an_unprepared_step_aborts_alone() -> None:
    machine = replica()
    begun(machine)
    assert machine.lost(T, 0.0) == []
    assert machine.open == {}
    assert choose(machine.ready()) == Operation(OperationKind.DROP, KEY)
    assert machine.receive(A, AskOutcome(KEY), 0.0) == [SendStepMessage(A, TellOutcome(KEY, Outcome.ABORTED))]


def test_without_its_trainer_a_prepared_step_asks_and_follows_one_commit() -> None:
    machine = replica()
    prepared(machine)
    assert machine.lost(T, 0.0) == [SendStepMessage(A, AskOutcome(KEY)), SendStepMessage(C, AskOutcome(KEY))]
    assert machine.in_doubt == (KEY,)
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0)
    machine.lost(C, 0.0)
    assert machine.in_doubt == (KEY,)  # a silent replica is waited for
    assert machine.tick(0.5) == [SendStepMessage(C, AskOutcome(KEY))]
    machine.receive(C, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False), 0.0)
    run(machine)
    assert [(entry.scale, entry.lr) for entry in machine.log] == [(0.25, 0.1)]


def test_a_prepared_step_that_all_others_deny_is_aborted() -> None:
    machine = replica()
    prepared(machine)
    machine.lost(T, 0.0)
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0)
    machine.receive(C, TellOutcome(KEY, Outcome.ABORTED), 0.0)
    assert machine.open == {}


def test_who_was_started_again_since_has_forgotten_what_its_earlier_life_knew() -> None:
    machine = replica()
    newer = KEY._replace(number=KEY.number + 1)
    prepared(machine, newer)
    assert machine.receive(A, AskOutcome(KEY), 0.0) == [SendStepMessage(A, TellOutcome(KEY, Outcome.FORGOTTEN))]
    never_opened = newer._replace(attempt=newer.attempt + 1)
    assert machine.receive(A, AskOutcome(never_opened), 0.0) == [
        SendStepMessage(A, TellOutcome(never_opened, Outcome.ABORTED))
    ]


def test_steps_of_a_replaced_generation_say_nothing_of_those_of_its_successor() -> None:
    machine = replica()
    successor = KEY._replace(generation=KEY.generation + 1)
    prepared(machine, KEY)
    assert machine.receive(A, AskOutcome(successor), 0.0) == [
        SendStepMessage(A, TellOutcome(successor, Outcome.FORGOTTEN))
    ]
    newer = successor._replace(number=successor.number + 1)
    prepared(machine, newer)
    newest = newer._replace(number=newer.number + 1)
    assert machine.receive(A, AskOutcome(newest), 0.0) == [SendStepMessage(A, TellOutcome(newest, Outcome.ABORTED))]


def test_who_has_left_a_stage_and_comes_back_has_forgotten_what_it_did_there() -> None:
    machine = replica()
    prepared(machine)
    committed = KEY._replace(number=KEY.number + 1)
    machine.start_round(0)
    machine.start_round(1, machine.base)
    assert machine.receive(A, AskOutcome(committed), 0.0) == [
        SendStepMessage(A, TellOutcome(committed, Outcome.FORGOTTEN))
    ]


@pytest.mark.parametrize("round", [1, 3])
def test_who_has_not_gone_on_to_the_next_round_vouches_for_nothing_that_was_opened_before(round: int) -> None:
    """Its stage was restored, or it was left out: what it had committed is dropped, and others may have it."""
    machine = replica()
    prepared(machine)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    run(machine)
    machine.start_round(round)
    assert machine.receive(U, Fence({0: 2}), 0.0) == [
        SendStepMessage(U, Fenced({0: 2}, (), (), round, {}, steady=False))
    ]


def test_an_answer_to_a_fence_vouches_since_the_oldest_attempt_that_was_opened_in_this_generation() -> None:
    machine = replica()
    prepared(machine)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    run(machine)
    machine.start_round(2)
    assert machine.receive(U, Fence({0: 2}), 0.0) == [
        SendStepMessage(U, Fenced({0: 2}, (), (), 2, {0: KEY}, steady=True))
    ]
    assert machine.receive(U, Fence({0: 1}), 0.0) == [SendStepMessage(U, Fenced({0: 1}, (), (), 2, {}, steady=True))], (
        "not of those not fenced"
    )


def test_nobody_outside_the_path_says_who_has_forgotten_a_step() -> None:
    machine = replica()
    prepared(machine)
    assert machine.receive(U, AskOutcome(KEY, (A, C)), 0.0) == []
    assert KEY in machine.open
    assert machine.in_doubt == ()


def test_when_one_has_forgotten_a_step_the_others_are_asked_again_and_told_so() -> None:
    """C may have committed it, told A so, and died: A's denial from before that counts no more."""
    machine = replica()
    prepared(machine)
    machine.lost(T, 0.0)
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0)
    assert machine.receive(C, TellOutcome(KEY, Outcome.FORGOTTEN), 0.0) == [SendStepMessage(A, AskOutcome(KEY, (C,)))]
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0)  # said before A knew
    assert machine.in_doubt == (KEY,)
    assert machine.tick(0.5) == [SendStepMessage(A, AskOutcome(KEY, (C,)))]
    machine.receive(A, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False), 0.0)
    run(machine)
    assert [(entry.scale, entry.lr) for entry in machine.log] == [(0.25, 0.1)]


def test_a_step_that_one_has_forgotten_is_aborted_when_all_others_know_that_and_deny_it() -> None:
    machine = replica()
    prepared(machine)
    machine.lost(T, 0.0)
    machine.receive(C, TellOutcome(KEY, Outcome.FORGOTTEN), 0.0)
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,)), 0.0)
    assert machine.open == {}


def test_whoever_is_told_that_one_has_forgotten_a_step_does_not_believe_its_earlier_generation() -> None:
    machine = replica()
    prepared(machine)
    assert machine.receive(A, AskOutcome(KEY, (C,)), 0.0) == [
        SendStepMessage(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,))),
        SendStepMessage(A, AskOutcome(KEY, (C,))),
    ]
    machine.receive(C, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False), 0.0)  # was on its way when C died
    assert machine.in_doubt == (KEY,)
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,)), 0.0)
    assert machine.open == {}


def test_answering_not_committed_is_a_promise() -> None:
    machine = replica()
    prepared(machine)
    assert machine.receive(A, AskOutcome(KEY), 0.0) == [
        SendStepMessage(A, TellOutcome(KEY, Outcome.NOT_COMMITTED)),
        SendStepMessage(A, AskOutcome(KEY)),
        SendStepMessage(C, AskOutcome(KEY)),
    ]
    assert machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0) == []
    assert run(machine) == []
    machine.receive(A, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0)
    assert machine.receive(C, TellOutcome(KEY, Outcome.NOT_COMMITTED), 0.0) == [SendStepMessage(T, Aborted(KEY))]


def test_an_unprepared_step_that_is_asked_about_is_aborted_and_its_trainer_told() -> None:
    machine = replica()
    begun(machine)
    sends = machine.receive(C, AskOutcome(KEY), 0.0)
    assert replies(sends, C) == [TellOutcome(KEY, Outcome.ABORTED)]
    assert replies(sends, T) == [Aborted(KEY)]
    assert machine.open == {}


def test_a_fence_settles_old_generations_and_refuses_them_from_then_on() -> None:
    machine = replica(max_open_steps=3)
    committed = KEY._replace(number=0)
    prepared(machine, committed)
    machine.receive(T, Commit(committed, 1.0, 0.1, False), 0.0)
    run(machine)
    doubted, running = KEY._replace(number=1), OTHER
    prepared(machine, doubted)
    begun(machine, running, U)
    sends = machine.receive(PeerId("K"), Fence({0: 2, 1: 2}), 0.0)
    since = {0: committed, 1: running}
    assert replies(sends, PeerId("K")) == [Fenced({0: 2, 1: 2}, (committed,), (doubted,), 1, since, steady=True)]
    assert machine.in_doubt == (doubted,)
    assert list(machine.open) == [doubted]
    late = KEY._replace(number=9)
    assert machine.receive(T, request(late), 0.0) == [SendStepMessage(T, Refused(late, "stale"))]
    assert machine.receive(T, Commit(doubted, 1.0, 0.1, False), 0.0) == []


def test_a_new_generation_settles_the_old_one_by_itself() -> None:
    machine = replica()
    prepared(machine)
    new = StepKey(0, 2, 0, 0)
    sends = machine.receive(PeerId("T2"), request(new), 0.0)
    assert machine.in_doubt == (KEY,)
    assert sends[-1] == SendStepMessage(PeerId("T2"), Opened(new))


def test_closing_finishes_what_has_begun_and_drops_the_rest() -> None:
    machine = replica(max_open_steps=3)
    begun(machine)
    machine.receive(U, request(OTHER), 0.0)
    assert machine.close() == [SendStepMessage(U, Refused(OTHER, "closed"))]
    assert not machine.closed
    assert machine.receive(U, request(OTHER._replace(attempt=1)), 0.0)[0].message == Refused(
        OTHER._replace(attempt=1), "closed"
    )
    machine.receive(A, Forward(KEY, 1), 0.0)
    machine.receive(C, Backward(KEY, 0), 0.0)
    machine.receive(C, Backward(KEY, 1), 0.0)
    run(machine)
    assert not machine.closed
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    run(machine)
    assert machine.closed


def test_from_its_join_on_only_the_round_decides() -> None:
    machine = replica(max_open_steps=3)
    prepared(machine)
    prepared(machine, OTHER, U)
    machine.lost(T, 0.0)
    machine.lost(U, 0.0)
    machine.close()
    assert machine.closed
    machine.join()
    machine.receive(A, TellOutcome(KEY, Outcome.COMMITTED, 1.0, 0.1, False), 0.0)
    machine.receive(A, TellOutcome(OTHER, Outcome.NOT_COMMITTED), 0.0)
    machine.receive(C, TellOutcome(OTHER, Outcome.NOT_COMMITTED), 0.0)
    assert machine.in_doubt == (KEY, OTHER)
    assert run(machine) == []
    machine.resolve(OTHER, Decision(0.5, 0.2, False))
    assert not machine.closed
    run(machine)
    assert machine.closed
    machine.resolve(KEY, None)
    assert [entry.key for entry in machine.log] == [OTHER]
    assert machine.open == {}


def test_a_record_drops_what_is_still_open_and_answers_its_trainer() -> None:
    machine = replica()
    prepared(machine)
    machine.lost(T, 0.0)
    machine.receive(T, Commit(KEY, 1.0, 0.1, False), 0.0)
    begun(machine, OTHER, U)
    sends = machine.start_round(2)
    assert replies(sends, T) == [Aborted(KEY)]
    assert replies(sends, U) == [Refused(OTHER, "closed")]
    assert [ready.operation.kind for ready in machine.ready()] == [OperationKind.DROP] * 2
    assert machine.open == {}
