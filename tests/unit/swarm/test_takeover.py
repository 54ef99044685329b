"""What the answers of replicas prove about a trainer that is gone, and where its slot goes on."""

from __future__ import annotations

import pytest

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StepKey
from shoal.swarm import takeover
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.takeover import Settled, TakeoverMachine, next_number
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.step import Fence, Fenced

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")
KEY, LATER, OTHER = StepKey(1, 1, 4, 0), StepKey(1, 1, 5, 0), StepKey(0, 1, 4, 0)


def fenced(
    *committed: StepKey,
    in_doubt: tuple[StepKey, ...] = (),
    since: StepKey | None = KEY,
    round: int = 3,
    lowest: int = 2,
    steady: bool = False,
) -> Fenced:
    return Fenced({1: lowest}, committed, in_doubt, round, {} if since is None else {1: since}, steady)


def machine(**answers: Fenced) -> TakeoverMachine:
    """Trainer 1.1 is gone in round 3; these replicas have answered."""
    made = TakeoverMachine(slot=1, lowest=2, round=3, now_s=10.0)
    for peer, answer in answers.items():
        made.receive(PeerId(peer), answer)
    return made


def test_live_replicas_are_asked_until_all_have_answered() -> None:
    asking = machine()
    assert asking.asks([A, B], 10.0) == [SendStepMessage(A, Fence({1: 2})), SendStepMessage(B, Fence({1: 2}))]
    assert asking.asks([A, B], 10.05) == []
    asking.receive(A, fenced())
    assert not asking.is_over([A, B], 10.05)
    assert asking.asks([A, B], 10.1) == [SendStepMessage(A, Fence({1: 2})), SendStepMessage(B, Fence({1: 2}))]
    asking.receive(B, fenced())
    assert asking.is_over([A, B], 10.1)


def test_who_names_ever_more_attempts_is_believed_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "MAX_COMMITTED", 4)
    asking = machine(B=fenced(KEY))
    made_up = [StepKey(1, 1, number, 0) for number in range(100, 106)]
    asking.receive(A, fenced(*made_up[:3]))
    with pytest.raises(RemoteProtocolError, match="A names more than 4 attempts of slot 1"):
        asking.receive(A, fenced(*made_up[3:]))
    assert asking.settled([A, B], ()).committed == {KEY}


def test_one_that_is_gone_is_not_waited_for_and_a_silent_one_not_for_ever() -> None:
    asking = machine(A=fenced())
    assert asking.is_over([A], 10.1)
    assert not asking.is_over([A, B], 14.9)
    assert asking.is_over([A, B], 15.1)


def test_doubt_is_waited_for_a_moment() -> None:
    asking = machine(A=fenced(in_doubt=(KEY,)), B=fenced())
    assert not asking.is_over([A, B], 10.9)
    assert asking.is_over([A, B], 11.1)
    asking.receive(A, fenced(KEY))
    assert asking.is_over([A, B], 10.9)


@pytest.mark.parametrize(
    ("answers", "is_denied"),
    [
        ({"A": fenced(), "B": fenced()}, True),
        ({"A": fenced()}, True),
        ({}, False),
        ({"C": fenced()}, False),
        ({"A": fenced(since=None)}, False),
        ({"A": fenced(since=LATER)}, False),
        ({"A": fenced(round=2)}, False),
        ({"A": fenced(round=4)}, False),
        ({"A": fenced(lowest=1)}, False),
        ({"A": fenced(), "B": fenced(KEY)}, False),
        ({"A": fenced(), "B": fenced(in_doubt=(KEY,))}, False),
        ({"A": fenced(), "C": fenced(KEY, since=None)}, False),
    ],
    ids=[
        "all of the path deny it",
        "one does and the other is cut off: it cannot have had a Commit",
        "all are cut off",
        "only one that is not on the path was asked",
        "the one that answers was started again",
        "it was started again since",
        "it is not in the round yet",
        "it is in the next round, and its commits are in a record",
        "it answers to an earlier fence",
        "the other has committed it",
        "the other is in doubt",
        "somebody else knows that it is committed",
    ],
)
def test_an_attempt_is_denied_by_one_of_its_path_that_has_lived_since(
    answers: dict[str, Fenced], is_denied: bool
) -> None:
    assert machine(**answers).settled({A, B, C}, ()).denies(KEY, (A, B)) == is_denied


@pytest.mark.parametrize(
    ("answer", "steady", "is_denied"),
    [
        (fenced(since=None, steady=True), (A,), True),
        (fenced(since=LATER, steady=True), (A,), True),
        (fenced(since=None, steady=True), (B,), False),
        (fenced(since=None, steady=False), (A,), False),
        (fenced(since=None, steady=True, round=2), (A,), False),
    ],
    ids=[
        "it has been in the round since it began",
        "and has opened something later",
        "its connection has ended since",
        "it has begun the round anew since",
        "it is not in the round",
    ],
)
def test_one_that_was_there_when_the_round_began_need_not_have_opened_anything(
    answer: Fenced, steady: tuple[PeerId, ...], is_denied: bool
) -> None:
    assert machine(A=answer).settled({A, B}, steady).denies(KEY, (A, B)) == is_denied


def test_what_somebody_has_committed_stays_so_if_it_is_started_again_before_all_is_settled() -> None:
    asking = machine(A=fenced(KEY), B=fenced(in_doubt=(KEY,)))
    asking.receive(A, fenced(since=None))
    settled = asking.settled({A, B}, ())
    assert (settled.committed, settled.in_doubt) == ({KEY}, set())


def test_other_slots_are_of_no_interest() -> None:
    settled = machine(A=fenced(KEY, OTHER, in_doubt=(LATER, OTHER))).settled({A}, ())
    assert settled.kept == {KEY, LATER}


def test_it_is_complete_when_those_have_answered_too_that_are_away() -> None:
    assert machine(A=fenced()).settled({A}, ()).complete
    assert not machine(A=fenced()).settled({A, B}, ()).complete
    assert not machine().settled({A}, ()).complete


@pytest.mark.parametrize(
    ("settled", "last_reported", "next_step", "is_known", "expected"),
    [
        (Settled(3, frozenset(), frozenset(), {}, complete=True), 7, 8, True, 8),
        (Settled(3, frozenset(), frozenset(), {}, complete=True), 9, 8, True, 10),
        (Settled(3, frozenset({StepKey(1, 1, 11, 0)}), frozenset(), {}, complete=True), 9, 8, True, 12),
        (Settled(3, frozenset(), frozenset({StepKey(1, 1, 11, 0)}), {}, complete=True), 9, 8, True, 12),
        (Settled(3, frozenset(), frozenset(), {}, complete=False), 9, 8, True, 10),
        (Settled(3, frozenset(), frozenset(), {}, complete=False), 9, 12, True, 12),
        (Settled(3, frozenset(), frozenset(), {}, complete=False), 9, 8, False, 14),
        (Settled(3, frozenset(), frozenset(), {}, complete=True), 9, 8, False, 10),
    ],
    ids=[
        "nothing is done",
        "what is reported is done",
        "what is committed is done",
        "what is in doubt counts as done",
        "all leases are known: one that is away changes nothing",
        "a lease waits for the record",
        "leases are not known, and one is away: it may have any steps, so the slot does no more",
        "leases are not known, and nobody is away",
    ],
)
def test_the_next_trainer_goes_on_after_all_that_may_count(
    settled: Settled, last_reported: int, next_step: int, is_known: bool, expected: int
) -> None:
    assert next_number(settled, StepRange(8, 14), last_reported, next_step, is_known=is_known) == expected
