"""A coordinator meets replicas of another chain of records: it chooses once, and says what it has left."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import BYTES, unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.records import record_hash, seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import ChainLeft, CoordinatorEffect, Overtaken, RoundReady, Send
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.wire.messages.base import Era, Hop, SampleRange
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    CommitRecord,
    Record,
    RoundState,
    SignedRecord,
    StageHashes,
    StageOutcome,
    Swapped,
)

ME, A, B, C = PeerId("C"), PeerId("a"), PeerId("b"), PeerId("c")


def chain_of(ballot: int, samples: int) -> SignedRecord:
    """The first record of a chain that was committed by another client, with so many samples."""
    other = Ballot(ballot, PeerId("D"), 1)
    outcome = StageOutcome(0, 0, (A,), (1,), BYTES, 0)
    ranges = (SampleRange(0, 0, samples),)
    record = Record("run", 1, other, "D0", (outcome,), ranges, (), {}, (), (Era(1, other),))
    return seal(record, other.peer, lambda _: b"")


SMALL, LARGE = chain_of(1, 10), chain_of(2, 20)


def ask(machine: RoundCoordinatorMachine, holders: dict[PeerId, SignedRecord]) -> list[CoordinatorEffect]:
    """These replicas answer the machine's ballot."""
    effects: list[CoordinatorEffect] = []
    for peer, record in holders.items():
        state = RoundState(machine.ballot, 0, 1, record, None, Hop(peer, ()), "", Basis(1, BYTES))
        effects += machine.receive(peer, state, 1.0)
    return effects


def met(here: SignedRecord, there: SignedRecord) -> tuple[RoundCoordinatorMachine, list[CoordinatorEffect]]:
    """A machine that trains on `here` with A, and has heard of B, which holds `there`."""
    settings = RoundSettings("run", 1, "D0", retry_s=1.0)
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    machine.replicas({A: Hop(A, ())}, 0.0)
    machine.lead(0.0)
    ask(machine, {A: here})
    assert isinstance(machine.receive(A, Swapped(1, 0, record_hash(here), BYTES, {}), 1.0)[-1], RoundReady)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 1.0)
    asked = ask(machine, {B: there})
    assert [(e.peer, type(e.message)) for e in asked if isinstance(e, Send)] == [(A, AskRound), (B, AskRound)]
    return machine, ask(machine, {A: here, B: there})


@pytest.mark.parametrize(("here", "there"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_the_larger_chain_stands_and_who_trains_on_the_other_one_is_overtaken(
    here: SignedRecord, there: SignedRecord
) -> None:
    machine, effects = met(here, there)
    assert machine.tip.hash == record_hash(LARGE)
    [left] = [effect for effect in effects if isinstance(effect, ChainLeft)]
    assert (left.left.hash, left.kept.hash) == (record_hash(SMALL), record_hash(LARGE))
    assert (left.common_round, left.num_samples, left.num_freed) == (0, 10, 0)
    overtaken = [effect.tip.hash for effect in effects if isinstance(effect, Overtaken)]
    assert overtaken == ([record_hash(LARGE)] if here is SMALL else [])
    loser = A if here is SMALL else B
    commit = CommitRecord(machine.ballot, LARGE, record_hash(SMALL))
    assert Send(loser, commit) in effects


def test_a_client_that_was_overtaken_has_no_round_ended_until_it_asks_anew_also_if_that_record_has_to_go() -> None:
    machine, _ = met(LARGE, SMALL)
    machine.receive(B, Swapped(1, 0, record_hash(LARGE), BYTES, {}), 2.0)
    machine.close(CloseRequest(2, {}, {}), 3.0)
    assert machine.phase is RoundPhase.JOINING
    other = Ballot(3, PeerId("D"), 1)
    outcome = StageOutcome(0, 0, (B,), (1,), StageHashes("p2", "", ""), 0)
    eras = (Era(1, unsealed(LARGE).ballot), Era(2, other))
    prepared = seal(
        Record("run", 2, other, record_hash(LARGE), (outcome,), (), (), {}, (), eras), other.peer, lambda _: b""
    )

    def says(peer: PeerId, record: SignedRecord | None = None, refused: str = "") -> list[CoordinatorEffect]:
        state = RoundState(machine.ballot, 0, 1, LARGE, record, Hop(peer, ()), refused, Basis(1, BYTES))
        return machine.receive(peer, state, 5.0)

    says(B, prepared)
    effects = [*says(A), *says(B, prepared)]
    assert [type(effect) for effect in effects if not isinstance(effect, Send)] == [Overtaken]
    says(A, refused="it has not staged these bytes")
    machine.lead(7.0)
    machine.lost(B, 7.0)
    assert isinstance(says(A)[-1], RoundReady)
    assert (machine.tip.hash, machine.phase) == (record_hash(LARGE), RoundPhase.IDLE)


def test_a_chain_that_was_left_is_not_chosen_among_again() -> None:
    machine, _ = met(LARGE, SMALL)
    ballot = machine.ballot
    effects = ask(machine, {B: SMALL})
    assert machine.ballot == ballot
    assert not any(isinstance(effect, ChainLeft) for effect in effects)


def test_a_chain_that_was_left_is_not_told_again_when_its_client_has_committed_one_more_record() -> None:
    machine, _ = met(LARGE, SMALL)
    record = unsealed(SMALL)
    ranges = (SampleRange(0, 10, 12),)
    later = msgspec.structs.replace(record, round=2, previous=record_hash(SMALL), samples=ranges)
    more = seal(later, PeerId("D"), lambda _: b"")
    ballot = machine.ballot
    ask(machine, {B: more})
    assert machine.ballot > ballot, "it is heard among all before it is left"
    assert not any(isinstance(effect, ChainLeft) for effect in ask(machine, {A: LARGE, B: more}))


def test_a_chain_that_was_left_is_judged_anew_when_a_holder_that_was_away_comes_back_with_it() -> None:
    machine, _ = met(LARGE, SMALL)
    ballot = machine.ballot
    machine.lost(B, 2.0)
    asked = ask(machine, {B: SMALL})
    assert machine.ballot > ballot
    assert [(e.peer, type(e.message)) for e in asked if isinstance(e, Send)] == [(A, AskRound), (B, AskRound)]


def test_a_chain_is_judged_anew_when_its_holder_was_not_heard_for_the_last_choice() -> None:
    machine, _ = met(LARGE, SMALL)
    machine.lead(2.0)
    machine.lost(B, 2.0)
    ask(machine, {A: LARGE})
    ballot = machine.ballot
    ask(machine, {B: SMALL})
    assert machine.ballot > ballot


@pytest.mark.parametrize("generation", [1, 2])
def test_what_an_earlier_start_of_this_client_has_committed_overtakes_it_as_others_do(generation: int) -> None:
    ballot = Ballot(3, ME, generation)
    outcome = StageOutcome(0, 0, (A,), (1,), BYTES, 0)
    ranges = (SampleRange(0, 10, 12),)
    record = Record("run", 2, ballot, record_hash(SMALL), (outcome,), ranges, (), {}, (), (Era(1, ballot),))
    later = seal(record, ME, lambda _: b"")
    machine, effects = met(SMALL, later)
    assert machine.tip.hash == record_hash(later)
    assert any(isinstance(effect, Overtaken) for effect in effects) == (generation != machine.ballot.generation)


def test_a_record_that_is_none_is_refused_before_anything_is_chosen() -> None:
    machine, _ = met(LARGE, SMALL)
    with pytest.raises(RemoteProtocolError):
        ask(machine, {B: SignedRecord(b"no record", PeerId("D"), b"")})


def test_a_replica_of_another_chain_is_told_so_though_its_record_is_older() -> None:
    ballot = Ballot(2, PeerId("D"), 1)
    outcome = StageOutcome(0, 0, (A,), (1,), BYTES, 0)
    ranges = (SampleRange(0, 0, 30),)
    newer = Record("run", 2, ballot, record_hash(LARGE), (outcome,), ranges, (), {}, (), (Era(1, ballot),))
    signed = seal(newer, ballot.peer, lambda _: b"")
    settings = RoundSettings("run", 1, "D0", retry_s=1.0)
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    machine.replicas({peer: Hop(peer, ()) for peer in (A, B, C)}, 0.0)
    machine.lead(0.0)
    held = {A: (2, signed), B: (1, SMALL), C: (1, LARGE)}
    effects: list[CoordinatorEffect] = []
    for peer, (round, record) in held.items():
        state = RoundState(machine.ballot, 0, round, record, None, Hop(peer, ()), "", Basis(round, BYTES))
        effects += machine.receive(peer, state, 1.0)
    told = {
        e.peer: e.message.instead_of for e in effects if isinstance(e, Send) and isinstance(e.message, CommitRecord)
    }
    assert told == {A: "", B: record_hash(SMALL), C: ""}


def test_who_swaps_to_what_is_neither_the_tip_nor_the_record_before_is_asked_what_it_holds() -> None:
    machine, _ = met(SMALL, LARGE)
    asked = machine.receive(A, Swapped(0, 0, "another record", BYTES, {}), 2.0)
    assert [(e.peer, type(e.message)) for e in asked if isinstance(e, Send)] == [(A, AskRound)]


def test_what_a_replica_said_of_its_old_chain_before_it_left_that_does_not_count_when_it_comes_late() -> None:
    machine, _ = met(LARGE, SMALL)
    refused = RoundState(machine.ballot, 0, 1, SMALL, None, Hop(B, ()), "it loads the other one", Basis(1, BYTES))
    machine.receive(B, Swapped(1, 0, record_hash(LARGE), BYTES, {}), 2.0)
    assert machine.receive(B, refused, 2.0) == []
    assert B in (machine.holders or {})
