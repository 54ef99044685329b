"""What a replica makes of orders that come twice, in any order, from somebody else, or from two clients of one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.swarm.round_effects import CloseSteps, Fetch, MemberEffect, Pin, RunRing, Send, Swap
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_orders import StepsClosed
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    AskRound,
    Close,
    CommitRecord,
    PrepareRecord,
    Propose,
    Record,
    RecordPrepared,
    RoundMessage,
    SignedRecord,
    Staged,
    StageHashes,
    StageOutcome,
    StaleBallot,
)

CLIENT, MALLORY = PeerId("C"), PeerId("M")
ME, OTHER = Hop(PeerId("R"), ("memory:R",)), Hop(PeerId("S"), ("memory:S",))
FIRST, SECOND = Ballot(1, CLIENT, 7), Ballot(1, CLIENT, 9)
INITIAL = StageHashes("p0", "m0", "b0")
EPOCHS = (0, 1, 2)


def hashes(round: int, epoch: int) -> StageHashes:
    return StageHashes(f"p{round}.{epoch}", "m", "b")


def record(round: int, epoch: int, previous: str) -> SignedRecord:
    outcome = StageOutcome(0, epoch, (OTHER.peer, ME.peer), (1, 2), hashes(round, epoch), 0)
    return seal(Record("run", round, FIRST, previous, (outcome,), (), (), {}), CLIENT, lambda _: b"")


def propose(round: int, epoch: int, ballot: Ballot = FIRST) -> Propose:
    return Propose(ballot, round, epoch, 0, (OTHER, ME), (1, 2))


D1 = {epoch: record(1, epoch, "D0") for epoch in EPOCHS}
D2 = record(2, 2, record_hash(D1[2]))
ORDERS: list[RoundMessage] = [
    AskRound(FIRST),
    *(Close(FIRST, round) for round in (1, 2)),
    *(propose(round, epoch) for round in (1, 2) for epoch in EPOCHS),
    *(PrepareRecord(FIRST, each) for each in (*D1.values(), D2)),
]
COMMITS: list[RoundMessage] = [CommitRecord(FIRST, each) for each in (D1[2], D2)]


class Replica:
    """One whose driver does at once what it is told.

    Attributes:
        done: What has happened, as a test wants to see it.
    """

    def __init__(self) -> None:
        self.machine = RoundMemberMachine(ME, 0, Tip(0, "D0", None), INITIAL, self.unsealed)
        self.done: list[MemberEffect] = []
        self.closed: list[int] = []
        self.swapped: list[Record] = []

    @staticmethod
    def unsealed(signed: SignedRecord) -> Record:
        return unseal(signed, "run", lambda *_: None)

    def hears(self, peer: PeerId, message: RoundMessage) -> None:
        self.obeys(self.machine.receive(peer, message))

    def obeys(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            self.done.append(effect)
            match effect:
                case CloseSteps(round):
                    assert round not in self.closed, "steps of a round are closed once"
                    self.closed.append(round)
                    self.obeys(self.machine.steps_closed(StepsClosed(3, (), ())))
                case RunRing(quorum):
                    self.obeys(self.machine.ring_done(quorum, hashes(quorum.round, quorum.epoch)))
                case Swap(swapped, found):
                    assert swapped.stages[0].hashes == found
                    self.swapped.append(swapped)
                    self.obeys(self.machine.swapped(found, {}))
                case Fetch(_, digest, wanted):
                    self.obeys(self.machine.fetched(digest, wanted))
                case Send(_, RecordPrepared(_, _, digest)):
                    assert any(isinstance(each, Pin) for each in self.done), f"nothing is kept for {digest}"
                case _:
                    pass


def in_order(replica: Replica) -> None:
    """The round as the client means it: its last quorum makes the record."""
    for order in (Close(FIRST, 1), propose(1, 2), PrepareRecord(FIRST, D1[2]), CommitRecord(FIRST, D1[2])):
        replica.hears(CLIENT, order)


@given(st.lists(st.sampled_from(ORDERS), max_size=25))
def test_orders_of_a_round_that_come_twice_and_in_any_order_keep_it_from_no_record(orders: list[RoundMessage]) -> None:
    replica = Replica()
    for order in orders:
        replica.hears(CLIENT, order)
    assert replica.swapped == [], "nothing was committed"
    in_order(replica)
    assert replica.machine.tip.hash == record_hash(D1[2])
    assert [each.round for each in replica.swapped] == [1]


@given(st.lists(st.sampled_from(ORDERS + COMMITS), max_size=30))
def test_no_order_that_comes_again_takes_a_replica_back_to_an_earlier_record(orders: list[RoundMessage]) -> None:
    replica = Replica()
    for order in orders:
        replica.hears(CLIENT, order)
    rounds = [each.round for each in replica.swapped]
    assert rounds == sorted(set(rounds))
    assert replica.machine.tip.round == max(rounds, default=0)


@given(st.data())
def test_what_somebody_else_says_of_it_changes_nothing(data: st.DataObject) -> None:
    alone, disturbed = Replica(), Replica()
    in_order(alone)
    for order in (Close(FIRST, 1), propose(1, 2), PrepareRecord(FIRST, D1[2]), CommitRecord(FIRST, D1[2])):
        for replayed in data.draw(st.lists(st.sampled_from(ORDERS + COMMITS), max_size=5)):
            with pytest.raises(RemoteProtocolError, match="ballot"):
                disturbed.hears(MALLORY, replayed)
        disturbed.hears(CLIENT, order)
    assert disturbed.done == alone.done


def test_of_two_clients_with_one_identity_one_is_followed_and_nothing_of_both_is_mixed() -> None:
    """Each start of a client has another generation in its ballots, also on another host."""
    replica = Replica()
    for order in (Close(FIRST, 1), propose(1, 0)):
        replica.hears(CLIENT, order)
    before = len(replica.done)
    for order in (AskRound(SECOND), Close(SECOND, 1), propose(1, 0, SECOND)):
        replica.hears(CLIENT, order)
    anew = [each for each in replica.done[before:] if isinstance(each, RunRing)]
    assert anew == [RunRing(propose(1, 0, SECOND))], "bytes of the other one's quorum are not told as its own"
    told = [each.message for each in replica.done[before:] if isinstance(each, Send)]
    assert {each.ballot for each in told if isinstance(each, Staged)} == {SECOND}
    for order in (Close(FIRST, 1), propose(1, 1), PrepareRecord(FIRST, D1[0]), CommitRecord(FIRST, D1[0])):
        replica.hears(CLIENT, order)
        assert replica.done[-1] == Send(CLIENT, StaleBallot(SECOND))
    assert replica.swapped == []
