"""A replica that is told to leave its own chain of records for another one, which was chosen."""

from __future__ import annotations

import msgspec
import pytest

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.swarm.round_effects import Fetch, ReplicaOut, Send, Swap
from shoal.swarm.round_member import RoundMemberMachine
from shoal.wire.messages.base import Era, Hop
from shoal.wire.messages.round import (
    Basis,
    CommitRecord,
    Record,
    Restore,
    RoundState,
    SignedRecord,
    StageHashes,
    StageOutcome,
)

ME = Hop(PeerId("me"), ())
HERE, THERE = Ballot(1, PeerId("C"), 1), Ballot(2, PeerId("D"), 1)
MINE, THEIRS = StageHashes("p", "m", "b"), StageHashes("q", "m", "b")


def opened(signed: SignedRecord) -> Record:
    return unseal(signed, "run", lambda *_: None)


def record(round: int, ballot: Ballot, hashes: StageHashes) -> SignedRecord:
    outcome = StageOutcome(0, 0, (ME.peer,), (1,), hashes, 0)
    return seal(Record("run", round, ballot, "before", (outcome,), (), (), {}), ballot.peer, lambda _: b"")


OWN, OTHER = record(7, HERE, MINE), record(3, THERE, THEIRS)


@pytest.fixture
def member() -> RoundMemberMachine:
    return RoundMemberMachine(ME, 0, Tip(7, record_hash(OWN), OWN), MINE, opened)


def test_an_older_record_is_taken_only_in_place_of_the_own_one(member: RoundMemberMachine) -> None:
    for not_meant in ("", "another record"):
        [answer] = member.receive(THERE.peer, CommitRecord(THERE, OTHER, instead_of=not_meant))
        assert isinstance(answer, Send), "its coordinator is not to believe for ever that it holds an older record"
        assert isinstance(answer.message, RoundState)
        assert (answer.message.record, answer.message.refused) == (OWN, "")
    out, fetch, state = member.receive(THERE.peer, CommitRecord(THERE, OTHER, instead_of=record_hash(OWN)))
    assert isinstance(out, ReplicaOut)
    assert "record 3, of another chain, was chosen over the record 7" in out.reason
    assert isinstance(fetch, Fetch)
    assert (fetch.record_hash, fetch.follows_base) == (record_hash(OTHER), False)
    # It keeps its own state until the other one is there, and says so.
    assert isinstance(state, Send)
    assert isinstance(state.message, RoundState)
    assert (state.message.record, state.message.basis) == (OWN, Basis(7, MINE))
    [swap] = member.fetched(record_hash(OTHER), THEIRS)
    assert swap == Swap(opened(OTHER), THEIRS, leaves_chain=True)
    member.swapped(THEIRS, {})
    assert (member.tip.hash, member.round) == (record_hash(OTHER), 4)


def follower(round: int, *eras: Era) -> SignedRecord:
    """A record some rounds after the member's own one; the eras say whose chain it is."""
    opened_record = msgspec.structs.replace(opened(record(round, THERE, THEIRS)), eras=eras)
    return seal(opened_record, THERE.peer, lambda _: b"")


@pytest.mark.parametrize(
    ("eras", "leaves_chain"),
    [((Era(1, HERE), Era(9, THERE)), False), ((Era(1, HERE), Era(6, THERE)), True)],
)
def test_a_record_that_follows_later_is_of_its_chain_if_it_was_committed_after_the_own_one(
    member: RoundMemberMachine, eras: tuple[Era, ...], leaves_chain: bool
) -> None:
    """Of the chain that it goes on with, the optimizer has learnt; of one that it leaves, it forgets that."""
    newest = follower(10, *eras)
    out, _, _ = member.receive(THERE.peer, CommitRecord(THERE, newest, record_hash(OWN) if leaves_chain else ""))
    assert isinstance(out, ReplicaOut)
    assert member.fetched(record_hash(newest), THEIRS) == [Swap(opened(newest), THEIRS, leaves_chain)]


@pytest.mark.parametrize("instead_of", ["", "another record"])
def test_for_a_newer_record_of_another_chain_it_leaves_its_own_only_if_that_is_named(
    member: RoundMemberMachine, instead_of: str
) -> None:
    newest = follower(10, Era(1, HERE), Era(6, THERE))
    restore = Restore(THERE, newest, 0, Basis(7, MINE), instead_of)
    for message in (CommitRecord(THERE, newest, instead_of), restore):
        [answer] = member.receive(THERE.peer, message)
        assert isinstance(answer, Send)
        assert isinstance(answer.message, RoundState)
        assert member.fetching is None


def test_a_stage_of_the_other_chain_may_go_on_from_the_bytes_that_are_here(member: RoundMemberMachine) -> None:
    basis = Basis(7, MINE)
    [answer] = member.receive(THERE.peer, Restore(THERE, OTHER, 0, basis))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, RoundState)
    restore = Restore(THERE, OTHER, 0, basis, instead_of=record_hash(OWN))
    assert member.receive(THERE.peer, restore) == [Swap(opened(OTHER), MINE, leaves_chain=True)]
    member.swapped(MINE, {})
    assert (member.tip.round, member.is_restored) == (3, True)
