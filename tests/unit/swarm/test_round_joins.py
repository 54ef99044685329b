"""Joins and the fate of steps in doubt."""

from __future__ import annotations

import pytest

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.round_joins import Fate, RoundJoins
from shoal.wire.messages.round import Join
from shoal.wire.messages.step import StepEntry

A, B = PeerId("a"), PeerId("b")
KEY = StepKey(0, 1, 2, 0)
ENTRY = StepEntry(KEY, (A, B), 0, (), 4, 0.5, 0.25, True)


def join(
    *, doubts: tuple[StepKey, ...] = (), log: tuple[StepEntry, ...] = (), aborted: tuple[StepKey, ...] = ()
) -> Join:
    return Join(Ballot(1, A, 1), 1, 0, 0, doubts, log, aborted)


def test_a_doubt_that_some_join_holds_is_committed_by_its_numbers() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(log=(ENTRY,)))
    assert joins.settle() == [(A, Fate(KEY, True, 0.5, 0.25, True))]
    assert joins.joins.keys() == {B}


def test_a_doubt_that_nobody_holds_is_aborted() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(doubts=(KEY,)))
    assert joins.settle() == [(A, Fate(KEY, False, 0.0, 0.0, False)), (B, Fate(KEY, False, 0.0, 0.0, False))]


def test_a_later_join_that_contradicts_is_not_taken() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.settle()
    joins.restart()
    assert joins.note(B, join(log=(ENTRY,))) == {B: KEY}
    assert B not in joins.joins


def test_a_fate_stays_though_its_only_witness_is_lost() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(log=(ENTRY,)))
    first = joins.settle()
    joins.restart()
    joins.note(A, join(doubts=(KEY,)))
    assert joins.settle() == first


@pytest.mark.parametrize("first", [A, B])
def test_what_an_earlier_coordinator_has_aborted_stays_so(first: PeerId) -> None:
    joins = RoundJoins()
    both = {A: join(aborted=(KEY,)), B: join(log=(ENTRY,))}
    found: dict[PeerId, StepKey] = {}
    for peer in sorted(both, key=lambda peer: peer != first):
        found |= joins.note(peer, both[peer])
    assert found == {B: KEY}
    assert joins.joins.keys() == {A}


def test_without_doubts_there_is_nothing_to_settle() -> None:
    joins = RoundJoins()
    joins.note(A, join(log=(ENTRY,)))
    assert joins.settle() == []
    assert joins.joins.keys() == {A}
