"""Who is told all of a record or of a quorum, and who its name, or what differs from the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import (
    BYTES,
    A,
    B,
    close,
    coordinator,
    lead,
    newcomer,
    prepare,
    sent,
    stage,
    state,
    unsealed,
    whole_round,
)

from shoal.ids import PeerId
from shoal.swarm.record_changes import completed
from shoal.swarm.records import record_hash
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect, Journal
from shoal.swarm.round_settings import CloseRequest, RoundPhase
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    Basis,
    CommitRecord,
    Join,
    PrepareRecord,
    Propose,
    QuorumTag,
    RecordName,
    RecordPrepared,
    SignedRecord,
    Staged,
    StageHashes,
    Swapped,
)

C = PeerId("c")
NEXT = StageHashes("p2", "m2", "b2")


@pytest.fixture
def machine() -> RoundCoordinatorMachine:
    return coordinator()


def first_round(machine: RoundCoordinatorMachine, *peers: PeerId) -> SignedRecord:
    """Round 1 with these members; returns its record."""
    lead(machine, *peers)
    close(machine, *peers)
    preparing = stage(machine, *peers)
    prepare(machine, preparing)
    signed: SignedRecord = sent(preparing, PrepareRecord)[A].record
    for peer in peers:
        machine.receive(peer, Swapped(1, 0, record_hash(signed), BYTES, {}), 4.0)
    return signed


def close_2(machine: RoundCoordinatorMachine, *peers: PeerId) -> dict[PeerId, Any]:
    effects = machine.close(CloseRequest(2, {}, {}), 5.0)
    for peer in peers:
        effects = machine.receive(peer, Join(machine.ballot, 2, 0, 0, (), (), ()), 5.0)
    return sent(effects, Propose)


def stage_2(machine: RoundCoordinatorMachine, *peers: PeerId, epoch: int = 0) -> dict[PeerId, Any]:
    effects: list[CoordinatorEffect] = []
    for peer in peers:
        effects = machine.receive(peer, Staged(machine.ballot, 2, epoch, 0, NEXT), 6.0)
    [journal] = [effect for effect in effects if isinstance(effect, Journal)]
    return sent(machine.journaled(journal.digest), PrepareRecord)


def test_who_has_prepared_a_record_is_told_its_name_also_when_that_is_repeated(
    machine: RoundCoordinatorMachine,
) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    prepare(machine, stage(machine, A, B))
    by_name = CommitRecord(machine.ballot, None, known=RecordName(1, machine.tip.hash))
    assert sent(machine.tick(10.0), CommitRecord) == {A: by_name, B: by_name}


def test_who_says_that_it_lacks_the_record_is_told_all_of_it_at_once_and_from_then_on(
    machine: RoundCoordinatorMachine,
) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    prepare(machine, stage(machine, A, B))
    whole = CommitRecord(machine.ballot, machine.tip.signed)
    assert sent(machine.receive(B, state(machine), 3.0), CommitRecord) == {B: whole}
    assert sent(machine.receive(B, state(machine), 3.0), CommitRecord) == {}, "once, until it is repeated"
    by_name = CommitRecord(machine.ballot, None, known=RecordName(1, machine.tip.hash))
    assert sent(machine.tick(10.0), CommitRecord) == {A: by_name, B: whole}


def test_who_was_lost_since_it_has_prepared_is_told_all_of_it(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    prepare(machine, stage(machine, A, B))
    machine.lost(B, 3.0)
    assert sent(machine.receive(B, state(machine), 4.0), CommitRecord) == {
        B: CommitRecord(machine.ballot, machine.tip.signed)
    }


def test_a_newcomer_is_told_all_of_it(machine: RoundCoordinatorMachine) -> None:
    newcomer(machine, whole_round(machine))


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_client_that_takes_over_tells_the_name_to_those_that_have_named_the_record(is_prepared: bool) -> None:
    signed = whole_round(coordinator())
    machine = coordinator()
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine, prepared=signed) if is_prepared else state(machine, signed, 1), 0.0)
    told = sent(machine.receive(B, state(machine), 0.0), CommitRecord)
    assert told == {
        A: CommitRecord(machine.ballot, None, known=RecordName(1, record_hash(signed))),
        B: CommitRecord(machine.ballot, signed),
    }


def test_a_record_is_told_as_what_differs_from_the_one_before(machine: RoundCoordinatorMachine) -> None:
    first = first_round(machine, A, B)
    close_2(machine, A, B)
    told = stage_2(machine, A, B)
    assert told.keys() == {A, B}
    message = told[A]
    assert message.base == RecordName(1, record_hash(first))
    body = completed(message.record.body, message.copied, first.body)
    record = unsealed(msgspec.structs.replace(message.record, body=body))
    assert (record.round, record.previous) == (2, record_hash(first))


def test_a_quorum_is_told_as_what_differs_to_those_that_were_in_the_one_before(
    machine: RoundCoordinatorMachine,
) -> None:
    signed = first_round(machine, A, B)
    machine.replicas({peer: Hop(peer, ()) for peer in (A, B, C)}, 4.0)
    machine.receive(C, state(machine, signed, 1), 4.0)
    told = close_2(machine, A, B, C)
    base = QuorumTag(1, machine.ballot, 0, 0)
    hops = tuple(Hop(peer, ()) for peer in (A, B, C))
    assert told[C].members == hops
    assert told[A] == told[B] == Propose(machine.ballot, 2, 0, 0, hops[2:], (0, 0, 0), base=base, order=(0, 1, 2))


def test_who_moved_to_another_address_is_told_anew() -> None:
    machine = coordinator()
    first_round(machine, A, B)
    elsewhere = msgspec.structs.replace(
        state(machine, machine.tip.signed, 1), hop=Hop(B, ("tcp:10.0.0.1:1",)), basis=Basis(1, BYTES)
    )
    machine.receive(B, elsewhere, 4.0)
    told = close_2(machine, A, B)[A]
    assert (told.members, told.order) == ((Hop(B, ("tcp:10.0.0.1:1",)),), (0, 2))


def test_who_was_lost_since_the_quorum_before_is_told_all_of_it(machine: RoundCoordinatorMachine) -> None:
    signed = first_round(machine, A, B)
    machine.lost(B, 4.0)
    machine.receive(B, state(machine, signed, 1), 4.0)
    told = close_2(machine, A, B)
    assert (told[A].base is None, told[B].base is None) == (False, True)


def test_who_cannot_tell_from_what_it_was_told_is_told_all_of_it_once(machine: RoundCoordinatorMachine) -> None:
    signed = first_round(machine, A, B)
    told = close_2(machine, A, B)[B]
    assert told.base is not None
    says = state(machine, signed, 1)
    [again] = sent(machine.receive(B, says, 5.0), Propose).items()
    assert again == (B, Propose(machine.ballot, 2, 0, 0, (Hop(A, ()), Hop(B, ())), (0, 0)))
    assert sent(machine.receive(B, says, 5.0), Propose) == {}
    assert machine.phase is RoundPhase.STAGING


def test_each_further_proposal_of_a_round_is_told_as_a_whole(machine: RoundCoordinatorMachine) -> None:
    first_round(machine, A, B)
    assert close_2(machine, A, B)[A].base is not None
    [again] = sent(machine.lost(B, 5.0), Propose).values()
    assert (again.epoch, again.base) == (1, None)
    told = stage_2(machine, A, epoch=1)[A]
    previous = machine.tip.signed
    assert previous is not None
    body = completed(told.record.body, told.copied, previous.body)
    machine.receive(A, RecordPrepared(machine.ballot, 2, record_hash(SignedRecord(body, A, b""))), 7.0)
    machine.receive(A, Swapped(2, 0, machine.tip.hash, NEXT, {}), 7.0)
    effects = machine.close(CloseRequest(3, {}, {}), 8.0)
    effects = machine.receive(A, Join(machine.ballot, 3, 0, 0, (), (), ()), 8.0)
    assert sent(effects, Propose)[A].base == QuorumTag(2, machine.ballot, 1, 0), "of the last epoch"


def test_after_a_takeover_quorums_are_told_as_a_whole(machine: RoundCoordinatorMachine) -> None:
    signed = first_round(machine, A, B)
    machine.lead(4.0)
    for peer in (A, B):
        machine.receive(peer, state(machine, signed, 1), 4.0)
    for peer in (A, B):
        machine.receive(peer, Swapped(1, 0, record_hash(signed), BYTES, {}), 4.0)
    assert {told.base for told in close_2(machine, A, B).values()} == {None}, "another client may have led meanwhile"
