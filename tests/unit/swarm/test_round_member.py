"""A replica's part in the round, message by message."""

from __future__ import annotations

import msgspec
import pytest

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.record_changes import changes
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.swarm.round_effects import CloseSteps, Fetch, Introduce, Pin, ReplicaOut, ResolveStep, RunRing, Send, Swap
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import MAX_BALLOTS_AHEAD, StepsClosed
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    CommitRecord,
    Copied,
    Foretold,
    Join,
    MemberLost,
    PrepareRecord,
    Propose,
    QuorumTag,
    Record,
    RecordName,
    RecordPrepared,
    Resolve,
    Restore,
    RoundState,
    SignedRecord,
    Staged,
    StageHashes,
    StageOutcome,
    StaleBallot,
    Swapped,
)

C, D = PeerId("C"), PeerId("D")
ME, OTHER = Hop(PeerId("R"), ("memory:R",)), Hop(PeerId("S"), ("memory:S",))
LOW, HIGH = Ballot(1, C, 1), Ballot(2, D, 1)
BYTES = StageHashes("p", "m", "b")
INITIAL = StageHashes("p0", "m0", "b0")
FRESH = Basis(0, INITIAL)
KEY = StepKey(0, 1, 2, 0)


@pytest.fixture
def member() -> RoundMemberMachine:
    return RoundMemberMachine(ME, 0, Tip(0, "D0", None), INITIAL, unsealed)


def unsealed(signed: SignedRecord) -> Record:
    return unseal(signed, "run", lambda *_: None)


def propose(epoch: int = 0, ballot: Ballot = LOW, round: int = 1) -> Propose:
    return Propose(ballot, round, epoch, 0, (OTHER, ME), (1, 2))


def record(ballot: Ballot = LOW, *, previous: str = "D0", hashes: StageHashes = BYTES, round: int = 1) -> SignedRecord:
    outcome = StageOutcome(0, 0, (OTHER.peer, ME.peer), (1, 2), hashes, 0)
    return seal(Record("run", round, ballot, previous, (outcome,), (), (), {}), ballot.peer, lambda _: b"")


def join(member: RoundMemberMachine, *doubts: StepKey) -> None:
    member.receive(C, Close(LOW, 1))
    member.steps_closed(StepsClosed(3, doubts, ()))


def stage(member: RoundMemberMachine) -> None:
    join(member)
    member.receive(C, propose())
    member.ring_done(propose(), BYTES)


def refusal(effects: list[object]) -> str:
    [*_, last] = effects
    assert isinstance(last, Send)
    assert isinstance(last.message, RoundState)
    return last.message.refused


def test_answering_a_ballot_is_a_promise(member: RoundMemberMachine) -> None:
    [answer] = member.receive(D, AskRound(HIGH))
    assert answer == Send(D, RoundState(HIGH, 0, 0, None, None, ME, "", FRESH))
    assert member.receive(C, AskRound(LOW)) == [Send(C, StaleBallot(HIGH))]
    assert member.receive(C, Close(LOW, 1)) == [Send(C, StaleBallot(HIGH))]
    assert not member.closing


def test_a_ballot_after_which_nobody_could_lead_is_refused(member: RoundMemberMachine) -> None:
    member.receive(D, AskRound(HIGH))
    far = HIGH.number + MAX_BALLOTS_AHEAD
    with pytest.raises(RemoteProtocolError, match="names ballot"):
        member.receive(C, AskRound(Ballot(far + 1, C, 1)))
    assert member.promised == HIGH
    member.receive(C, AskRound(Ballot(far, C, 1)))
    assert member.promised.number == far


def test_a_ballot_belongs_to_its_peer(member: RoundMemberMachine) -> None:
    with pytest.raises(RemoteProtocolError, match="ballot"):
        member.receive(D, AskRound(LOW))


def test_close_is_answered_by_a_join_and_again_when_repeated(member: RoundMemberMachine) -> None:
    assert member.receive(C, Close(LOW, 1)) == [CloseSteps(1)]
    assert member.receive(C, Close(LOW, 1)) == []
    expected = Send(C, Join(LOW, 1, 0, 3, (), (), ()))
    assert member.steps_closed(StepsClosed(3, (), ())) == [expected]
    assert member.receive(C, Close(LOW, 1)) == [expected]


def test_a_new_coordinator_gets_the_same_join(member: RoundMemberMachine) -> None:
    join(member)
    [answer] = member.receive(D, Close(HIGH, 1))
    assert answer == Send(D, Join(HIGH, 1, 0, 3, (), (), ()))


def test_a_coordinator_that_has_not_closed_the_round_gets_no_join(member: RoundMemberMachine) -> None:
    member.receive(C, Close(LOW, 1))
    member.receive(D, AskRound(HIGH))
    assert member.steps_closed(StepsClosed(3, (), ())) == []
    assert member.receive(D, Close(HIGH, 1)) == [Send(D, Join(HIGH, 1, 0, 3, (), (), ()))]


def test_a_round_that_lies_ahead_cannot_be_closed(member: RoundMemberMachine) -> None:
    assert "round 2" in refusal(member.receive(C, Close(LOW, 2)))


def foretell(member: RoundMemberMachine) -> PrepareRecord:
    """Have it join with what it will stage, and propose that quorum; return the record that follows at once."""
    member.receive(C, Close(LOW, 1))
    member.steps_closed(StepsClosed(3, (), (), foretold=Foretold("", BYTES)))
    member.receive(C, propose())
    return PrepareRecord(LOW, record())


def test_a_record_of_what_was_foretold_is_prepared_as_soon_as_its_bytes_are_staged(member: RoundMemberMachine) -> None:
    message = foretell(member)
    assert member.receive(C, message) == []
    staged, pin, prepared = member.ring_done(propose(), BYTES)
    assert staged == Send(C, Staged(LOW, 1, 0, 0, BYTES))
    assert (pin, prepared) == (Pin(BYTES), Send(C, RecordPrepared(LOW, 1, record_hash(message.record))))


def test_other_bytes_than_were_foretold_are_not_prepared(member: RoundMemberMachine) -> None:
    member.receive(C, foretell(member))
    staged, answer = member.ring_done(propose(), INITIAL)
    assert staged == Send(C, Staged(LOW, 1, 0, 0, INITIAL))
    assert "not staged" in refusal([answer])


def test_what_was_foretold_is_not_prepared_once_a_higher_ballot_is_followed(member: RoundMemberMachine) -> None:
    member.receive(C, foretell(member))
    member.receive(D, AskRound(HIGH))
    assert member.ring_done(propose(), BYTES) == [Send(D, Staged(LOW, 1, 0, 0, BYTES))]
    assert member.prepared is None


def test_a_later_quorum_ends_the_wait_for_what_was_foretold(member: RoundMemberMachine) -> None:
    member.receive(C, foretell(member))
    member.receive(C, propose(epoch=1))
    assert member.ring_done(propose(epoch=1), BYTES) == [Send(C, Staged(LOW, 1, 1, 0, BYTES))]


def test_each_doubt_is_resolved_once_and_then_joined_again(member: RoundMemberMachine) -> None:
    join(member, KEY)
    fate = Resolve(LOW, 1, KEY, True, 1.0, 0.1, False)
    assert member.receive(C, fate) == [ResolveStep(fate)]
    assert member.receive(C, fate) == []
    assert member.receive(C, Close(LOW, 1)) == []
    assert member.steps_closed(StepsClosed(4, (), ())) == [Send(C, Join(LOW, 1, 0, 4, (), (), ()))]


def test_a_join_names_what_was_aborted_for_the_next_coordinator(member: RoundMemberMachine) -> None:
    join(member, KEY)
    member.receive(C, Resolve(LOW, 1, KEY, False, 0.0, 0.0, False))
    assert member.steps_closed(StepsClosed(3, (), ())) == [Send(C, Join(LOW, 1, 0, 3, (), (), (KEY,)))]


def test_a_quorum_is_averaged_and_reported(member: RoundMemberMachine) -> None:
    join(member)
    assert member.receive(C, propose()) == [Introduce(OTHER), RunRing(propose())]
    assert member.ring_done(propose(), BYTES) == [Send(C, Staged(LOW, 1, 0, 0, BYTES))]
    assert member.receive(C, propose()) == [Send(C, Staged(LOW, 1, 0, 0, BYTES))]


def test_an_older_quorum_is_ignored(member: RoundMemberMachine) -> None:
    join(member)
    member.receive(C, propose(1))
    assert member.receive(C, propose(0)) == []
    assert member.ring_done(propose(0), BYTES) == []


def test_a_quorum_before_the_join_is_refused(member: RoundMemberMachine) -> None:
    assert "not joined" in refusal(member.receive(C, propose()))


@pytest.mark.parametrize(
    "quorum",
    [
        Propose(LOW, 1, 0, 1, (OTHER, ME), (1, 2)),
        Propose(LOW, 1, 0, 0, (OTHER,), (1,)),
        Propose(LOW, 1, 0, 0, (ME, ME), (1, 2)),
        Propose(LOW, 1, 0, 0, (OTHER, OTHER, ME), (1, 1, 1)),
        Propose(LOW, 1, 0, 0, (OTHER, ME), (1,)),
        Propose(LOW, 1, 0, 0, (OTHER, ME), (1, -2)),
    ],
)
def test_a_quorum_that_contradicts_itself_is_a_mistake(member: RoundMemberMachine, quorum: Propose) -> None:
    join(member)
    with pytest.raises(RemoteProtocolError):
        member.receive(C, quorum)


def test_a_lost_member_is_reported_while_the_ring_needs_it(member: RoundMemberMachine) -> None:
    join(member)
    assert member.lost(OTHER.peer) == []
    member.receive(C, propose())
    assert member.lost(PeerId("X")) == []
    assert member.lost(OTHER.peer) == [Send(C, MemberLost(LOW, 1, 0, 0, OTHER.peer))]
    member.ring_done(propose(), BYTES)
    assert member.lost(OTHER.peer) == []


def test_prepared_is_answered_by_who_has_the_bytes_and_they_are_pinned(member: RoundMemberMachine) -> None:
    stage(member)
    effects = member.receive(C, PrepareRecord(LOW, record()))
    assert effects == [Pin(BYTES), Send(C, RecordPrepared(LOW, 1, record_hash(record())))]
    [answer] = member.receive(D, AskRound(HIGH))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, RoundState)
    assert answer.message.prepared == record()


@pytest.mark.parametrize("wrong", [record(previous="D0'"), record(hashes=StageHashes("q", "m", "b"))])
def test_a_record_that_does_not_fit_is_not_prepared(member: RoundMemberMachine, wrong: SignedRecord) -> None:
    stage(member)
    assert "not staged" in refusal(member.receive(C, PrepareRecord(LOW, wrong)))
    assert member.prepared is None


def test_a_record_of_an_earlier_quorum_is_not_prepared_any_more(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, propose(1))
    assert member.receive(C, PrepareRecord(LOW, record())) == []


def test_the_record_is_swapped_only_when_committed(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, PrepareRecord(LOW, record()))
    assert member.tip.round == 0
    [swap] = member.receive(C, CommitRecord(LOW, record()))
    assert isinstance(swap, Swap)
    assert swap.hashes == BYTES
    assert member.receive(C, CommitRecord(LOW, record())) == []
    report = Send(C, Swapped(1, 0, record_hash(record()), BYTES, {"state": 3}))
    assert member.swapped(BYTES, {"state": 3}) == [report]
    assert (member.tip.round, member.round, member.joined) == (1, 2, None)
    assert member.receive(C, CommitRecord(LOW, record())) == [report]


def test_bytes_that_are_not_the_record_s_are_not_swapped(member: RoundMemberMachine) -> None:
    stage(member)
    effects = member.receive(C, CommitRecord(LOW, record(hashes=StageHashes("q", "m", "b"))))
    assert isinstance(effects[0], ReplicaOut)
    assert "not staged" in refusal(effects)
    assert member.swapping is None


def test_a_prepared_record_can_be_swapped_after_another_quorum_was_staged(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, PrepareRecord(LOW, record()))
    member.receive(D, propose(0, HIGH))
    member.ring_done(propose(0, HIGH), StageHashes("q", "m", "b"))
    [swap] = member.receive(D, CommitRecord(HIGH, record()))
    assert isinstance(swap, Swap)


def test_unpinned_bytes_are_forgotten_with_the_next_quorum(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, propose(1))
    member.ring_done(propose(1), StageHashes("q", "m", "b"))
    assert isinstance(member.receive(C, CommitRecord(LOW, record()))[0], ReplicaOut)


def test_late_orders_of_an_ended_round_have_no_effect(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, CommitRecord(LOW, record()))
    assert member.receive(C, Close(LOW, 2)) == []
    member.swapped(BYTES, {})
    for late in (Close(LOW, 1), propose(), PrepareRecord(LOW, record())):
        assert member.receive(C, late) == []


def test_a_broken_state_leaves_the_ring(member: RoundMemberMachine) -> None:
    join(member)
    member.receive(C, propose())
    out, lost = member.state_broken("why")
    assert out == ReplicaOut(ME.peer, "why")
    assert lost == Send(C, MemberLost(LOW, 1, 0, 0, ME.peer))


def test_a_swap_that_fails_is_refused(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, CommitRecord(LOW, record()))
    assert refusal(member.state_broken("why")) == "why"
    assert member.swapping is None


# -- a replica that was left behind


def test_a_committed_record_without_its_bytes_is_fetched_and_then_swapped(member: RoundMemberMachine) -> None:
    late = record(round=7, previous="D6")
    effects = member.receive(C, CommitRecord(LOW, late))
    assert [type(effect) for effect in effects] == [ReplicaOut, Fetch, Send]
    assert "not staged" in refusal(effects)
    fetch = effects[1]
    assert isinstance(fetch, Fetch)
    assert (fetch.record.round, fetch.record_hash, fetch.hashes) == (7, record_hash(late), BYTES)
    # It is asked again and again: the transfer goes on.
    assert [type(effect) for effect in member.receive(C, CommitRecord(LOW, late))] == [Send]
    [swap] = member.fetched(record_hash(late), BYTES)
    assert isinstance(swap, Swap)
    assert member.swapped(BYTES, {}) == [Send(C, Swapped(7, 0, record_hash(late), BYTES, {}))]
    assert (member.tip.round, member.round) == (7, 8)


def test_the_newest_record_is_fetched(member: RoundMemberMachine) -> None:
    member.receive(C, CommitRecord(LOW, record(round=7, previous="D6")))
    newer = record(round=8, previous="D7")
    [_, fetch, _] = member.receive(C, CommitRecord(LOW, newer))
    assert isinstance(fetch, Fetch)
    assert fetch.record_hash == record_hash(newer)
    assert member.fetched(record_hash(record(round=7, previous="D6")), BYTES) == []
    assert member.fetched(record_hash(newer), BYTES) != []


def test_a_coordinator_for_whom_the_own_record_stands_ends_the_fetching(member: RoundMemberMachine) -> None:
    late = record(round=7, previous="D6")
    member.receive(C, CommitRecord(LOW, late))
    assert member.receive(D, Close(HIGH, 1)) == [CloseSteps(1)]
    assert member.fetched(record_hash(late), BYTES) == []


def test_a_record_of_another_chain_is_followed_and_named(member: RoundMemberMachine) -> None:
    effects = member.receive(C, CommitRecord(LOW, record(previous="another D0")))
    assert "does not follow" in refusal(effects)
    assert isinstance(effects[1], Fetch)


def test_a_swap_whose_bytes_are_gone_becomes_a_transfer(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, CommitRecord(LOW, record()))
    effects = member.state_broken("why")
    assert [type(effect) for effect in effects] == [ReplicaOut, Fetch, Send]


def test_a_replica_that_is_behind_says_so_until_its_round_is_closed() -> None:
    member = RoundMemberMachine(ME, 0, Tip(0, "D0", None), INITIAL, unsealed, is_behind=True)
    [answer] = member.receive(C, AskRound(LOW))
    assert answer == Send(C, RoundState(LOW, 0, NO_BASE, None, None, ME, "", FRESH))
    member.receive(C, Close(LOW, 1))
    [answer] = member.receive(C, AskRound(LOW))
    assert answer == Send(C, RoundState(LOW, 0, 0, None, None, ME, "", FRESH))


OTHERS = StageHashes("q", "n", "c")


def restore(basis: Basis, signed: SignedRecord) -> Restore:
    return Restore(LOW, signed, 0, basis)


def restored(member: RoundMemberMachine) -> SignedRecord:
    """The member goes on from record 1, whose bytes nobody holds, with its initial ones."""
    signed = record()
    member.receive(C, CommitRecord(LOW, signed))
    assert member.receive(C, restore(FRESH, signed)) == [Swap(unsealed(signed), INITIAL)]
    [report] = member.swapped(INITIAL, {})
    assert report == Send(C, Swapped(1, 0, record_hash(signed), INITIAL, {}))
    return signed


def test_a_member_of_a_restored_stage_keeps_its_bytes_and_says_so(member: RoundMemberMachine) -> None:
    signed = restored(member)
    assert (member.round, member.basis, member.is_restored) == (2, FRESH, True)
    assert member.receive(C, AskRound(LOW)) == [Send(C, RoundState(LOW, 0, 1, signed, None, ME, "", FRESH))]
    # Repetitions change nothing, and neither does the record that it holds.
    [again] = member.receive(C, restore(FRESH, signed))
    assert again == Send(C, Swapped(1, 0, record_hash(signed), INITIAL, {}))
    assert member.receive(C, CommitRecord(LOW, signed)) == [again]


def test_a_member_with_other_bytes_does_not_restore(member: RoundMemberMachine) -> None:
    signed = record()
    assert "other ones" in refusal(member.receive(C, restore(Basis(0, OTHERS), signed)))
    assert member.round == 1


def test_a_restored_member_fetches_the_record_s_bytes_when_they_are_found(member: RoundMemberMachine) -> None:
    signed = restored(member)
    order = restore(Basis(1, BYTES), signed)
    assert any(isinstance(effect, Fetch) for effect in member.receive(C, order))
    assert not any(isinstance(effect, Fetch) for effect in member.receive(C, order))
    assert member.fetched(record_hash(signed), BYTES) == [Swap(unsealed(signed), BYTES)]
    member.swapped(BYTES, {})
    assert (member.basis, member.is_restored) == (Basis(1, BYTES), False)
    # Who has the record's own bytes is not to go back to older ones.
    [answer] = member.receive(C, restore(FRESH, signed))
    assert answer == Send(C, Swapped(1, 0, record_hash(signed), BYTES, {}))


def test_the_next_record_makes_a_restored_member_like_all_others(member: RoundMemberMachine) -> None:
    signed = restored(member)
    following = record(previous=record_hash(signed), hashes=OTHERS, round=2)
    member.receive(C, Close(LOW, 2))
    member.steps_closed(StepsClosed(0, (), ()))
    quorum = propose(round=2)
    member.receive(C, quorum)
    member.ring_done(quorum, OTHERS)
    member.receive(C, PrepareRecord(LOW, following))
    assert member.receive(C, CommitRecord(LOW, following)) == [Swap(unsealed(following), OTHERS, keeps_rest=True)]
    member.swapped(OTHERS, {})
    assert (member.basis, member.is_restored) == (Basis(2, OTHERS), False)


def swap_of(effects: list[object]) -> Swap:
    [found] = [effect for effect in effects if isinstance(effect, Swap)]
    return found


def test_only_who_has_averaged_what_it_swaps_to_and_counts_in_it_keeps_the_rest(member: RoundMemberMachine) -> None:
    stage(member)
    assert swap_of(member.receive(C, CommitRecord(LOW, record()))).keeps_rest


@pytest.mark.parametrize(
    ("members", "scales"), [((OTHER.peer,), ()), ((OTHER.peer, ME.peer), (1.0, 0.0))], ids=["out", "not finite"]
)
def test_who_does_not_count_in_the_record_keeps_nothing(
    member: RoundMemberMachine, members: tuple[PeerId, ...], scales: tuple[float, ...]
) -> None:
    stage(member)
    outcome = StageOutcome(0, 0, members, (1, 2)[: len(members)], BYTES, 0, None, scales)
    signed = seal(Record("run", 1, LOW, "D0", (outcome,), (), (), {}), LOW.peer, lambda _: b"")
    assert not swap_of(member.receive(C, CommitRecord(LOW, signed))).keeps_rest


def test_another_life_of_a_member_keeps_nothing(member: RoundMemberMachine) -> None:
    signed = record()
    member.receive(C, CommitRecord(LOW, signed))
    assert not swap_of(member.fetched(record_hash(signed), BYTES)).keeps_rest


def test_who_has_to_fetch_what_it_had_staged_keeps_nothing(member: RoundMemberMachine) -> None:
    stage(member)
    signed = record()
    member.receive(C, CommitRecord(LOW, signed))
    member.state_broken("the staged bytes are gone")
    assert not swap_of(member.fetched(record_hash(signed), BYTES)).keeps_rest


def test_whoever_has_the_record_s_bytes_already_needs_no_other(member: RoundMemberMachine) -> None:
    signed = record(hashes=INITIAL)  # nobody has trained
    assert member.receive(C, CommitRecord(LOW, signed)) == [Swap(unsealed(signed), INITIAL)]


def test_a_member_whose_memory_is_broken_has_no_bytes(member: RoundMemberMachine) -> None:
    join(member)
    member.receive(C, propose())
    member.state_broken("a bit has flipped")
    assert member.basis.hashes != INITIAL


def named(signed: SignedRecord, round: int = 1) -> RecordName:
    return RecordName(round, record_hash(signed))


def test_who_has_prepared_a_record_swaps_to_it_by_its_name_and_to_no_other_one(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, PrepareRecord(LOW, record()))
    other = record(hashes=StageHashes("q", "m", "b"))
    [answer] = member.receive(C, CommitRecord(LOW, None, known=named(other)))
    assert answer == Send(C, RoundState(LOW, 0, 0, None, record(), ME, "", FRESH)), "it says what it has"
    assert member.swapping is None
    by_name = CommitRecord(LOW, None, known=named(record()))
    [swap] = member.receive(C, by_name)
    assert swap == Swap(unsealed(record()), BYTES, keeps_rest=True)
    assert member.receive(C, by_name) == []
    [report] = member.swapped(BYTES, {})
    assert member.receive(C, by_name) == [report]


def test_a_name_says_nothing_to_who_has_no_such_record(member: RoundMemberMachine) -> None:
    stage(member)
    for message in (CommitRecord(LOW, None, known=named(record())), CommitRecord(LOW, None)):
        [answer] = member.receive(C, message)
        assert answer == Send(C, RoundState(LOW, 0, 0, None, None, ME, "", FRESH))
    assert (member.swapping, member.fetching) == (None, None)


def test_a_name_counts_under_a_ballot_that_is_followed(member: RoundMemberMachine) -> None:
    stage(member)
    member.receive(C, PrepareRecord(LOW, record()))
    member.receive(D, AskRound(HIGH))
    by_name = CommitRecord(LOW, None, known=named(record()))
    assert member.receive(C, by_name) == [Send(C, StaleBallot(HIGH))]
    [swap] = member.receive(D, CommitRecord(HIGH, None, known=named(record())))
    assert isinstance(swap, Swap), "the next client finishes it"


def in_round_2(member: RoundMemberMachine) -> SignedRecord:
    stage(member)
    member.receive(C, PrepareRecord(LOW, record()))
    member.receive(C, CommitRecord(LOW, record()))
    member.swapped(BYTES, {})
    member.receive(C, Close(LOW, 2))
    member.steps_closed(StepsClosed(3, (), ()))
    return record()


AGAIN = Propose(LOW, 2, 0, 0, (), (3, 4), base=QuorumTag.of(propose()), order=(0, 1))
NEXT = StageHashes("p2", "m2", "b2")


def test_a_quorum_is_told_as_what_differs_from_the_last_one(member: RoundMemberMachine) -> None:
    in_round_2(member)
    whole = Propose(LOW, 2, 0, 0, (OTHER, ME), (3, 4))
    assert member.receive(C, AGAIN) == [Introduce(OTHER), RunRing(whole)]
    assert member.receive(C, AGAIN) == [], "said twice"
    assert member.ring_done(whole, NEXT) == [Send(C, Staged(LOW, 2, 0, 0, NEXT))]
    assert member.receive(C, AGAIN) == [Send(C, Staged(LOW, 2, 0, 0, NEXT))]


def test_another_member_or_address_is_told_beside_the_last_quorum(member: RoundMemberMachine) -> None:
    in_round_2(member)
    moved, new = Hop(OTHER.peer, ("memory:elsewhere",)), Hop(PeerId("T"), ("memory:T",))
    message = Propose(LOW, 2, 0, 0, (new, moved), (3, 4, 5), base=QuorumTag.of(propose()), order=(1, 3, 2))
    effects = member.receive(C, message)
    assert effects == [Introduce(moved), Introduce(new), RunRing(Propose(LOW, 2, 0, 0, (ME, moved, new), (3, 4, 5)))]


@pytest.mark.parametrize("base", [propose(epoch=1), propose(ballot=HIGH), propose(round=2)])
def test_who_was_not_in_the_quorum_before_says_what_it_holds(member: RoundMemberMachine, base: Propose) -> None:
    in_round_2(member)
    message = Propose(LOW, 2, 0, 0, (), (3, 4), base=QuorumTag.of(base), order=(0, 1))
    [answer] = member.receive(C, message)
    assert refusal([answer]) == "", "it is no refusal, so it is told all of it"
    assert member.quorum is None


@pytest.mark.parametrize("order", [(0, 2), (0, 1, 1)])
def test_places_that_nobody_has_are_a_mistake(member: RoundMemberMachine, order: tuple[int, ...]) -> None:
    in_round_2(member)
    with pytest.raises(RemoteProtocolError, match="places"):
        member.receive(C, Propose(LOW, 2, 0, 0, (), (3,) * len(order), base=QuorumTag.of(propose()), order=order))


def test_a_record_is_prepared_from_what_differs_from_the_one_that_is_held(member: RoundMemberMachine) -> None:
    first = in_round_2(member)
    member.receive(C, AGAIN)
    member.ring_done(Propose(LOW, 2, 0, 0, (OTHER, ME), (3, 4)), NEXT)
    second = record(previous=record_hash(first), hashes=NEXT, round=2)
    fresh, copied = changes(second.body, first.body)
    message = PrepareRecord(LOW, msgspec.structs.replace(second, body=fresh), named(first), copied)
    [pin, answer] = member.receive(C, message)
    assert (pin, answer) == (Pin(NEXT), Send(C, RecordPrepared(LOW, 2, record_hash(second))))
    assert member.prepared == second
    wrong = msgspec.structs.replace(message, copied=(Copied(0, 0, len(first.body) + 1),))
    with pytest.raises(RemoteProtocolError, match="cannot be made of"):
        member.receive(C, wrong)
    elsewhere = msgspec.structs.replace(message, base=RecordName(1, "another record"))
    assert "before is not held" in refusal(member.receive(C, elsewhere))
    late = msgspec.structs.replace(message, base=RecordName(0, "another record"))
    assert member.receive(C, late) == []
