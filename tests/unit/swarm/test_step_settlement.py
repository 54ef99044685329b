"""A step without its trainer, and at the end of a round: who decides what, rule by rule."""

from __future__ import annotations

import pytest
from tests.unit.swarm.step_by_hand import (
    KEY,
    OTHER,
    A,
    C,
    T,
    U,
    begun,
    prepared,
    replica,
    replies,
    request,
    run,
)

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
    assert machine.peer_lost(T) == []
    assert machine.open == {}
    assert choose(machine.ready()) == Operation(OperationKind.DROP, KEY)
    assert machine.handle(A, AskOutcome(KEY)) == [SendStepMessage(A, TellOutcome(KEY, Outcome.ABORTED))]


def test_without_its_trainer_a_prepared_step_asks_and_follows_one_commit() -> None:
    machine = replica()
    prepared(machine)
    assert machine.peer_lost(T) == [SendStepMessage(A, AskOutcome(KEY)), SendStepMessage(C, AskOutcome(KEY))]
    assert machine.in_doubt == (KEY,)
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED))
    machine.peer_lost(C)
    assert machine.in_doubt == (KEY,)  # a silent replica is waited for
    assert machine.remind() == [SendStepMessage(C, AskOutcome(KEY))]
    machine.handle(C, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False))
    run(machine)
    assert [(entry.scale, entry.lr) for entry in machine.log] == [(0.25, 0.1)]


def test_a_prepared_step_that_all_others_deny_is_aborted() -> None:
    machine = replica()
    prepared(machine)
    machine.peer_lost(T)
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED))
    machine.handle(C, TellOutcome(KEY, Outcome.ABORTED))
    assert machine.open == {}


def test_who_was_started_again_since_has_forgotten_what_its_earlier_life_knew() -> None:
    machine = replica()
    newer = KEY._replace(number=KEY.number + 1)
    prepared(machine, newer)
    assert machine.handle(A, AskOutcome(KEY)) == [SendStepMessage(A, TellOutcome(KEY, Outcome.FORGOTTEN))]
    never_opened = newer._replace(attempt=newer.attempt + 1)
    assert machine.handle(A, AskOutcome(never_opened)) == [
        SendStepMessage(A, TellOutcome(never_opened, Outcome.ABORTED))
    ]


def test_steps_of_a_replaced_generation_say_nothing_of_those_of_its_successor() -> None:
    machine = replica()
    successor = KEY._replace(generation=KEY.generation + 1)
    prepared(machine, KEY)
    assert machine.handle(A, AskOutcome(successor)) == [SendStepMessage(A, TellOutcome(successor, Outcome.FORGOTTEN))]
    newer = successor._replace(number=successor.number + 1)
    prepared(machine, newer)
    newest = newer._replace(number=newer.number + 1)
    assert machine.handle(A, AskOutcome(newest)) == [SendStepMessage(A, TellOutcome(newest, Outcome.ABORTED))]


def test_who_has_left_a_stage_and_comes_back_has_forgotten_what_it_did_there() -> None:
    machine = replica()
    prepared(machine)
    committed = KEY._replace(number=KEY.number + 1)
    machine.start_round(0)
    machine.start_round(1, machine.base)
    assert machine.handle(A, AskOutcome(committed)) == [SendStepMessage(A, TellOutcome(committed, Outcome.FORGOTTEN))]


@pytest.mark.parametrize("round", [1, 3])
def test_who_has_not_gone_on_to_the_next_round_vouches_for_nothing_that_was_opened_before(round: int) -> None:
    """Its stage was restored, or it was left out: what it had committed is dropped, and others may have it."""
    machine = replica()
    prepared(machine)
    machine.handle(T, Commit(KEY, 1.0, 0.1, False))
    run(machine)
    machine.start_round(round)
    assert machine.handle(U, Fence({0: 2})) == [SendStepMessage(U, Fenced({0: 2}, (), (), round, {}, steady=False))]


def test_an_answer_to_a_fence_vouches_since_the_oldest_attempt_that_was_opened_in_this_generation() -> None:
    machine = replica()
    prepared(machine)
    machine.handle(T, Commit(KEY, 1.0, 0.1, False))
    run(machine)
    machine.start_round(2)
    assert machine.handle(U, Fence({0: 2})) == [SendStepMessage(U, Fenced({0: 2}, (), (), 2, {0: KEY}, steady=True))]
    assert machine.handle(U, Fence({0: 1})) == [SendStepMessage(U, Fenced({0: 1}, (), (), 2, {}, steady=True))], (
        "not of those not fenced"
    )


def test_nobody_outside_the_path_says_who_has_forgotten_a_step() -> None:
    machine = replica()
    prepared(machine)
    assert machine.handle(U, AskOutcome(KEY, (A, C))) == []
    assert KEY in machine.open
    assert machine.in_doubt == ()


def test_when_one_has_forgotten_a_step_the_others_are_asked_again_and_told_so() -> None:
    """C may have committed it, told A so, and died: A's denial from before that counts no more."""
    machine = replica()
    prepared(machine)
    machine.peer_lost(T)
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED))
    assert machine.handle(C, TellOutcome(KEY, Outcome.FORGOTTEN)) == [SendStepMessage(A, AskOutcome(KEY, (C,)))]
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED))  # said before A knew
    assert machine.in_doubt == (KEY,)
    assert machine.remind() == [SendStepMessage(A, AskOutcome(KEY, (C,)))]
    machine.handle(A, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False))
    run(machine)
    assert [(entry.scale, entry.lr) for entry in machine.log] == [(0.25, 0.1)]


def test_a_step_that_one_has_forgotten_is_aborted_when_all_others_know_that_and_deny_it() -> None:
    machine = replica()
    prepared(machine)
    machine.peer_lost(T)
    machine.handle(C, TellOutcome(KEY, Outcome.FORGOTTEN))
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,)))
    assert machine.open == {}


def test_whoever_is_told_that_one_has_forgotten_a_step_does_not_believe_its_earlier_generation() -> None:
    machine = replica()
    prepared(machine)
    assert machine.handle(A, AskOutcome(KEY, (C,))) == [
        SendStepMessage(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,))),
        SendStepMessage(A, AskOutcome(KEY, (C,))),
    ]
    machine.handle(C, TellOutcome(KEY, Outcome.COMMITTED, 0.25, 0.1, False))  # was on its way when C died
    assert machine.in_doubt == (KEY,)
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED, forgotten=(C,)))
    assert machine.open == {}


def test_answering_not_committed_is_a_promise() -> None:
    machine = replica()
    prepared(machine)
    assert machine.handle(A, AskOutcome(KEY)) == [
        SendStepMessage(A, TellOutcome(KEY, Outcome.NOT_COMMITTED)),
        SendStepMessage(A, AskOutcome(KEY)),
        SendStepMessage(C, AskOutcome(KEY)),
    ]
    assert machine.handle(T, Commit(KEY, 1.0, 0.1, False)) == []
    assert run(machine) == []
    machine.handle(A, TellOutcome(KEY, Outcome.NOT_COMMITTED))
    assert machine.handle(C, TellOutcome(KEY, Outcome.NOT_COMMITTED)) == [SendStepMessage(T, Aborted(KEY))]


def test_an_unprepared_step_that_is_asked_about_is_aborted_and_its_trainer_told() -> None:
    machine = replica()
    begun(machine)
    sends = machine.handle(C, AskOutcome(KEY))
    assert replies(sends, C) == [TellOutcome(KEY, Outcome.ABORTED)]
    assert replies(sends, T) == [Aborted(KEY)]
    assert machine.open == {}


def test_a_fence_settles_old_generations_and_refuses_them_from_then_on() -> None:
    machine = replica(max_open_steps=3)
    committed = KEY._replace(number=0)
    prepared(machine, committed)
    machine.handle(T, Commit(committed, 1.0, 0.1, False))
    run(machine)
    doubted, running = KEY._replace(number=1), OTHER
    prepared(machine, doubted)
    begun(machine, running, U)
    sends = machine.handle(PeerId("K"), Fence({0: 2, 1: 2}))
    since = {0: committed, 1: running}
    assert replies(sends, PeerId("K")) == [Fenced({0: 2, 1: 2}, (committed,), (doubted,), 1, since, steady=True)]
    assert machine.in_doubt == (doubted,)
    assert list(machine.open) == [doubted]
    late = KEY._replace(number=9)
    assert machine.handle(T, request(late)) == [SendStepMessage(T, Refused(late, "stale"))]
    assert machine.handle(T, Commit(doubted, 1.0, 0.1, False)) == []


def test_a_new_generation_settles_the_old_one_by_itself() -> None:
    machine = replica()
    prepared(machine)
    new = StepKey(0, 2, 0, 0)
    sends = machine.handle(PeerId("T2"), request(new))
    assert machine.in_doubt == (KEY,)
    assert sends[-1] == SendStepMessage(PeerId("T2"), Opened(new))


def test_closing_finishes_what_has_begun_and_drops_the_rest() -> None:
    machine = replica(max_open_steps=3)
    begun(machine)
    machine.handle(U, request(OTHER))
    assert machine.close() == [SendStepMessage(U, Refused(OTHER, "closed"))]
    assert not machine.closed
    assert machine.handle(U, request(OTHER._replace(attempt=1)))[0].message == Refused(
        OTHER._replace(attempt=1), "closed"
    )
    machine.handle(A, Forward(KEY, 1))
    machine.handle(C, Backward(KEY, 0))
    machine.handle(C, Backward(KEY, 1))
    run(machine)
    assert not machine.closed
    machine.handle(T, Commit(KEY, 1.0, 0.1, False))
    run(machine)
    assert machine.closed


def test_from_its_join_on_only_the_round_decides() -> None:
    machine = replica(max_open_steps=3)
    prepared(machine)
    prepared(machine, OTHER, U)
    machine.peer_lost(T)
    machine.peer_lost(U)
    machine.close()
    assert machine.closed
    machine.join()
    machine.handle(A, TellOutcome(KEY, Outcome.COMMITTED, 1.0, 0.1, False))
    machine.handle(A, TellOutcome(OTHER, Outcome.NOT_COMMITTED))
    machine.handle(C, TellOutcome(OTHER, Outcome.NOT_COMMITTED))
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
    machine.peer_lost(T)
    machine.handle(T, Commit(KEY, 1.0, 0.1, False))
    begun(machine, OTHER, U)
    sends = machine.start_round(2)
    assert replies(sends, T) == [Aborted(KEY)]
    assert replies(sends, U) == [Refused(OTHER, "closed")]
    assert [ready.operation.kind for ready in machine.ready()] == [OperationKind.DROP] * 2
    assert machine.open == {}
