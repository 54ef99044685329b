"""The quorum of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm import round_quorums as module
from shoal.swarm.ring_order import Links, ring_order
from shoal.swarm.round_quorums import RoundQuorums, StageQuorum, first_quorum, odd_ones_out
from shoal.swarm.round_settings import RoundSettings
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Join, StageHashes, StageOutcome
from shoal.wire.messages.step import StepEntry

A, B, C, D = (PeerId(letter) for letter in "abcd")


def hashes(text: str) -> StageHashes:
    return StageHashes(text, text, text)


def join(stage: int, num_targets: int) -> Join:
    """Of a replica that has trained 8 samples, if any."""
    entry = StepEntry(StepKey(0, 1, 0, 0), (), 0, (SampleRange(0, 0, 8),), 8, num_targets, 1.0, 0.1, False)
    return Join(Ballot(1, A, 1), 1, stage, 8, (), (entry,) if num_targets else (), ())


def test_members_stand_in_the_order_of_their_slots_and_spares_last() -> None:
    joins = {A: join(0, 0), B: join(0, 5), C: join(1, 9), D: join(0, 3)}
    quorum = first_quorum(0, joins, {B: 1, D: 0, C: 0}, 4)
    assert quorum.members == (D, B, A)
    assert [quorum.weights[peer] for peer in quorum.members] == [3, 5, 0]
    assert quorum.epoch == 4


def test_a_quorum_is_agreed_when_all_have_staged_the_same() -> None:
    quorum = StageQuorum(0, (A, B), {A: 1, B: 2})
    assert quorum.note(A, 0, hashes("x")) is None
    assert not quorum.agreed
    assert quorum.note(B, 0, hashes("x")) is None
    assert quorum.agreed
    assert quorum.final() == StageOutcome(0, 0, (A, B), (1, 2), hashes("x"), 0)


def test_bytes_that_differ_are_computed_once_more_before_anyone_leaves() -> None:
    quorum = StageQuorum(0, (A, B, C), {A: 1, B: 1, C: 1})
    for peer, text in ((A, "x"), (B, "y")):
        assert quorum.note(peer, 0, hashes(text)) is None
    assert quorum.note(C, 0, hashes("x")) == frozenset()
    quorum.next_epoch()
    for peer, text in ((A, "x"), (B, "y")):
        assert quorum.note(peer, 1, hashes(text)) is None
    assert quorum.note(C, 1, hashes("x")) == {B}


def test_what_was_staged_for_another_epoch_does_not_count() -> None:
    quorum = StageQuorum(0, (A,), {A: 1})
    quorum.next_epoch()
    assert quorum.note(A, 0, hashes("x")) is None
    assert not quorum.agreed
    assert quorum.note(B, 1, hashes("x")) is None
    assert not quorum.agreed


def test_a_new_epoch_goes_on_without_those_that_left() -> None:
    quorum = StageQuorum(0, (A, B, C), {A: 1, B: 2, C: 3})
    quorum.note(A, 0, hashes("x"))
    quorum.next_epoch(frozenset((B,)))
    assert (quorum.members, quorum.epoch, quorum.staged) == ((A, C), 1, {})


def test_the_bytes_of_most_stand_and_on_a_tie_those_of_the_first_in_the_ring() -> None:
    x, y = hashes("x"), hashes("y")
    assert odd_ones_out((A, B, C), {A: y, B: x, C: x}) == {A}
    assert odd_ones_out((A, B), {A: y, B: x}) == {B}
    assert odd_ones_out((B, A), {A: y, B: x}) == {A}


def test_what_a_stage_s_quorum_is_to_be_is_found_once_and_anew_where_a_join_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordered: list[Sequence[PeerId]] = []

    def counted(members: Sequence[PeerId], links: Links) -> tuple[PeerId, ...]:
        ordered.append(members)
        return ring_order(members, links)

    monkeypatch.setattr(module, "ring_order", counted)
    settings, slots = RoundSettings("run", 2, "D0"), {A: 0, B: 1, C: 0, D: 1}
    joins = {A: join(0, 4), B: join(0, 5), C: join(1, 9), D: join(1, 3)}
    quorums = RoundQuorums()
    quorums.epochs[0] = 3
    for stage in range(2):
        quorums.foresee(stage, settings, joins, slots)
    assert ordered == [[A, B], [C, D]]
    assert quorums.begin(settings, {**joins, D: join(1, 0)}, slots) == []
    assert ordered[2:] == [[C, D]], "of the other stage nothing has changed"
    assert quorums[0] == first_quorum(0, joins, slots, 3)
    assert quorums[1].weights == {C: 9, D: 0}
    quorums[0].note(A, 3, hashes("x"))
    quorums.begin(settings, joins, slots)
    assert quorums[0].staged == {}, "begun again"
