"""Which message a fault waits for."""

from __future__ import annotations

import pytest

from shoal.ids import NO_BALLOT, PeerId, StepKey
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.round import Close, QuorumTag
from shoal.wire.messages.step import Commit, Committed
from shoal_lab.faults.messages import Faults

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def commit(number: int) -> Commit:
    return Commit(StepKey(0, 1, number, 0), 1.0, 0.1, False)


@pytest.mark.parametrize(
    "which",
    [{"sender": C}, {"receiver": A}, {"number": 8}, {"scale": 0.5}, {"skipped": True}, {"after": 1}],
    ids=lambda which: next(iter(which)),
)
def test_a_message_that_does_not_fit_passes(which: dict[str, object]) -> None:
    faults, happened = Faults(), []
    faults.when(Commit, action=lambda: happened.append("fault"), **which)
    faults.deliver(A, B, commit(7))
    assert not happened


def test_a_fault_happens_once_at_the_message_that_fits() -> None:
    faults, happened = Faults(), []
    faults.when(Commit, Close, action=lambda: happened.append("fault"), sender=A, receiver=B, number=7, scale=1.0)
    for message in (Committed(StepKey(0, 1, 7, 0)), commit(6), commit(7), commit(7)):
        faults.deliver(A, B, message)
        assert bool(happened) == (message == commit(7))
    assert happened == ["fault"]


def test_messages_can_be_let_pass_first() -> None:
    faults, seen, happened = Faults(), [], []
    faults.when(Close, action=lambda: happened.append(len(seen)), round=2, after=2)
    for round in (2, 1, 2, 2, 2):
        seen.append(round)
        faults.deliver(A, B, Close(NO_BALLOT, round))
    assert happened == [4]


def test_a_field_that_no_such_message_has_is_refused_or_the_fault_would_never_happen() -> None:
    with pytest.raises(ValueError, match="no Close or RingPart has held, number_of"):
        Faults().when(Close, RingPart, action=lambda: None, round=1, held=2, number_of=3)


def test_a_message_of_a_collective_is_of_the_round_that_its_tag_names() -> None:
    faults, happened = Faults(), []
    faults.when(RingPart, action=lambda: happened.append("fault"), round=2, chunk=1)
    for round, chunk in ((1, 1), (2, 0), (2, 1)):
        faults.deliver(A, B, RingPart(QuorumTag(round, NO_BALLOT, 0, 0).encoded(), 0, False, 0, chunk, 0))
        assert bool(happened) == ((round, chunk) == (2, 1))


def test_faults_at_one_message_happen_in_their_order_and_may_set_others() -> None:
    faults, happened = Faults(), []

    def first() -> None:
        happened.append("first")
        faults.when(Commit, action=lambda: happened.append("third"))

    faults.when(Commit, action=first)
    faults.when(Commit, action=lambda: happened.append("second"))
    faults.deliver(A, B, commit(0))
    assert happened == ["first", "second"]
    faults.deliver(A, B, commit(0))
    assert happened == ["first", "second", "third"]
