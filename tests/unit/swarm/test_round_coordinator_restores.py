"""What the coordinator does when nobody holds the bytes of a stage any more."""

from __future__ import annotations

import math

import pytest
from tests.unit.swarm.test_round_coordinator import (
    BYTES,
    INITIAL,
    A,
    B,
    close,
    coordinator,
    lead,
    prepare,
    sent,
    stage,
    state,
    whole_round,
)
from tests.unit.swarm.test_round_coordinator_mirrors import successor

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import record_hash
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import (
    CoordinatorEffect,
    Deposed,
    Journal,
    RecordCommitted,
    ReplicaIn,
    ReplicaOut,
    Restored,
    RoundReady,
    Stuck,
)
from shoal.swarm.round_settings import CloseRequest, RoundPhase
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    CommitRecord,
    Join,
    RecordPrepared,
    Restore,
    SignedRecord,
    Staged,
    StageHashes,
    StaleBallot,
    Swapped,
)

C = PeerId("c")
NEXT = StageHashes("p2", "m2", "b2")


@pytest.fixture
def machine() -> RoundCoordinatorMachine:
    return coordinator()


def lost_stage(machine: RoundCoordinatorMachine) -> tuple[SignedRecord, list[CoordinatorEffect]]:
    """A, who alone holds record 1, comes back as the same peer without it."""
    signed = whole_round(machine)
    assert machine.lost(A, 5.0) == [Stuck((0,))]
    assert machine.wake_at_s < math.inf
    assert sent(machine.receive(A, state(machine), 6.0), CommitRecord).keys() == {A}
    asked = machine.receive(A, state(machine, refused="it has not these bytes"), 6.0)
    assert sent(asked, AskRound).keys() == {A}, "what is restored is chosen having heard everyone just now"
    assert [effect for effect in asked if isinstance(effect, Restored)] == []
    return signed, machine.receive(A, state(machine), 6.0)


def test_a_stage_is_restored_when_its_only_holder_has_come_back_without_its_state(
    machine: RoundCoordinatorMachine,
) -> None:
    signed, effects = lost_stage(machine)
    assert Restored(0, 1, INITIAL) in effects
    assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, INITIAL)}
    # It is repeated until it is answered.
    assert sent(machine.tick(7.0), Restore).keys() == {A}
    effects = machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 7.0)
    assert effects == [ReplicaIn(A), Stuck(()), RoundReady(machine.tip, {A: 0}, {})]
    assert machine.holders == {A: 0}
    machine.close(CloseRequest(2, {}, {}), 8.0)
    machine.receive(A, Join(machine.ballot, 2, 0, 0, (), (), ()), 8.0)
    [journal] = machine.receive(A, Staged(machine.ballot, 2, 0, 0, BYTES), 9.0)
    assert isinstance(journal, Journal)
    assert journal.record.stages[0].restored == INITIAL


def test_a_holder_that_comes_before_the_quorums_wins_and_one_that_comes_later_is_out(
    machine: RoundCoordinatorMachine,
) -> None:
    signed, _ = lost_stage(machine)
    machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 7.0)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 8.0)
    effects = machine.receive(B, state(machine, signed, 1), 8.0)
    assert Restored(0, 1, None) in effects
    assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, Basis(1, BYTES))}
    assert machine.holders == {B: 0}


@pytest.mark.parametrize("is_back", [False, True])
def test_who_had_the_bytes_of_a_stage_that_others_have_restored_is_waited_for(
    machine: RoundCoordinatorMachine, is_back: bool
) -> None:
    """B came with the record's own bytes and is lost, before A could fetch them."""
    signed, _ = lost_stage(machine)
    machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 7.0)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 8.0)
    machine.receive(B, state(machine, signed, 1), 8.0)
    machine.lead(9.0)
    machine.lost(B, 9.0)
    effects = machine.receive(A, state(machine, signed, 1, basis=INITIAL), 9.0)
    assert effects == [Stuck((0,))]
    if is_back:
        effects = machine.receive(B, state(machine, signed, 1), 10.0)
        assert not any(isinstance(effect, Restored) and effect.basis for effect in effects)
        assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, Basis(1, BYTES))}
    else:
        effects = machine.tick(9.0 + machine.settings.lost_state_after_s)
        assert Restored(0, 1, INITIAL) in effects


def test_nothing_is_restored_of_a_stage_whose_bytes_a_replica_has_got_since_it_was_asked(
    machine: RoundCoordinatorMachine,
) -> None:
    """It may have got them under another client, and told that one only."""
    signed = whole_round(machine)
    machine.lost(A, 5.0)
    machine.receive(A, state(machine), 6.0)
    machine.receive(A, state(machine, refused="it has not these bytes"), 6.0)
    effects = machine.receive(A, state(machine, signed, 1), 6.1)
    assert [effect for effect in effects if isinstance(effect, Restored)] == []
    assert machine.holders == {A: 0}


def test_a_record_that_may_have_to_go_is_chosen_anew_under_another_ballot(machine: RoundCoordinatorMachine) -> None:
    """Its round may be averaged once more; the quorums are told from those before by ballot and epoch."""
    lead(machine, A)
    close(machine, A)
    prepare(machine, stage(machine, A))
    before = machine.ballot
    machine.lost(A, 5.0)
    machine.receive(A, state(machine), 6.0)
    asked = machine.receive(A, state(machine, refused="it has not these bytes"), 6.0)
    assert sent(asked, AskRound)[A].ballot > before


def test_as_long_as_a_stage_is_missing_everybody_is_asked_again_and_who_follows_another_client_says_so() -> None:
    machine = coordinator(num_stages=2)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine), 0.0)
    assert isinstance(machine.receive(B, state(machine, stage=1), 0.0)[0], RoundReady)
    assert machine.wake_at_s == math.inf
    assert machine.lost(B, 1.0) == [Stuck((1,))]
    assert sent(machine.tick(2.0), AskRound).keys() == {A, B}
    assert machine.receive(A, state(machine), 2.0) == []
    higher = Ballot(9, PeerId("other"), 1)
    assert machine.receive(A, StaleBallot(higher), 3.0) == [Deposed(higher)]


@pytest.mark.parametrize(("says", "until_s"), [("state", 65.0), ("swapped", 64.0)])
def test_a_holder_that_comes_and_goes_while_another_replica_is_waited_for_is_waited_for_anew(
    says: str, until_s: float
) -> None:
    machine = coordinator()
    signed = whole_round(machine)
    machine.lost(A, 5.0)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ()), C: Hop(C, ())}, 5.0)
    machine.lead(5.0)
    machine.receive(B, state(machine), 6.0)
    held = state(machine, signed, 1) if says == "state" else Swapped(1, 0, record_hash(signed), BYTES, {})
    machine.receive(A, held, 34.0)
    machine.lost(A, 35.0)
    machine.lost(C, 36.0)
    for now_s, bases in ((until_s - 0.1, []), (until_s, [INITIAL])):
        effects = [*machine.tick(now_s), *machine.receive(B, state(machine), now_s)]
        assert [effect.basis for effect in effects if isinstance(effect, Restored)] == bases


def test_a_holder_that_comes_after_the_quorums_is_out(machine: RoundCoordinatorMachine) -> None:
    signed, _ = lost_stage(machine)
    machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 7.0)
    machine.close(CloseRequest(2, {}, {}), 8.0)
    machine.receive(A, Join(machine.ballot, 2, 0, 0, (), (), ()), 8.0)
    assert machine.phase is RoundPhase.STAGING
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 9.0)
    machine.receive(B, state(machine, signed, 1), 9.0)
    effects = machine.receive(B, Swapped(1, 0, record_hash(signed), BYTES, {}), 9.0)
    assert any(isinstance(effect, ReplicaOut) for effect in effects)
    assert machine.holders == {A: 0}


def test_what_was_said_before_a_swap_and_comes_after_it_does_not_count(machine: RoundCoordinatorMachine) -> None:
    whole_round(machine)
    assert machine.receive(A, state(machine, refused="not yet"), 5.0) == []
    assert machine.holders == {A: 0}


def test_a_client_that_takes_over_goes_on_with_what_was_restored(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    machine.lead(5.0)
    effects = machine.receive(A, state(machine, signed, 1, basis=INITIAL), 5.0)
    assert Restored(0, 1, INITIAL) in effects
    assert machine.holders == {A: 0}


@pytest.mark.parametrize("is_reconsidered", [False, True])
def test_who_has_better_bytes_than_its_stage_was_restored_from_refuses_what_it_was_told_and_takes_part(
    machine: RoundCoordinatorMachine, is_reconsidered: bool
) -> None:
    first, old, better = whole_round(machine), INITIAL, Basis(1, BYTES)
    second = successor(machine)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 5.0)
    machine.lead(5.0)
    machine.receive(A, state(machine, second, 2, basis=old), 5.0)
    effects = machine.receive(B, state(machine, first, 1), 5.0)
    assert Restored(0, 2, old) in effects
    assert sent(effects, CommitRecord)[B] == CommitRecord(machine.ballot, second)
    effects = machine.receive(B, state(machine, first, 1), 6.0) if is_reconsidered else []
    effects += machine.receive(B, state(machine, first, 1, refused="it has not staged these bytes"), 6.0)
    assert Restored(0, 2, better) in effects
    assert sent(effects, Restore)[B] == Restore(machine.ballot, second, 0, better)
    machine.receive(A, state(machine, second, 2, basis=old, refused="its stage goes on from other bytes"), 6.0)
    machine.receive(B, Swapped(2, 0, record_hash(second), BYTES, {}), 7.0)
    assert machine.holders == {B: 0}


def dropped(machine: RoundCoordinatorMachine, *asked: int) -> list[CoordinatorEffect]:
    """All have prepared record 2, and are lost before anybody is known to have swapped: record 1 stands again. Then the
    client has these rounds ended."""
    signed = whole_round(machine)
    machine.close(CloseRequest(2, {}, {}, keep=True), 5.0)
    machine.receive(A, Join(machine.ballot, 2, 0, 0, (), (), ()), 5.0)
    [journal] = machine.receive(A, Staged(machine.ballot, 2, 0, 0, NEXT), 6.0)
    assert isinstance(journal, Journal)
    machine.journaled(journal.digest)
    machine.receive(A, RecordPrepared(machine.ballot, 2, journal.digest), 7.0)
    assert machine.tip.hash == journal.digest
    for round in asked:
        machine.close(CloseRequest(round, {}, {}), 7.0)
    machine.replicas({B: Hop(B, ())}, 8.0)
    machine.lead(8.0)
    return machine.receive(B, state(machine, signed, 1), 8.0)


def test_what_belongs_to_a_record_that_is_dropped_restores_nothing(machine: RoundCoordinatorMachine) -> None:
    effects = dropped(machine)
    assert [effect for effect in effects if isinstance(effect, Restored)] == []
    assert machine.holders == {B: 0}


def test_a_round_whose_record_is_dropped_is_ended_again_as_its_client_has_asked_once(
    machine: RoundCoordinatorMachine,
) -> None:
    assert sent(dropped(machine), Close) == {B: Close(machine.ballot, 2)}
    machine.receive(B, Join(machine.ballot, 2, 0, 0, (), (), ()), 9.0)
    [journal] = machine.receive(B, Staged(machine.ballot, 2, 0, 0, NEXT), 9.0)
    assert isinstance(journal, Journal)
    assert journal.record.keep, "as it was asked for this round"
    machine.journaled(journal.digest)
    machine.receive(B, RecordPrepared(machine.ballot, 2, journal.digest), 9.0)
    effects = machine.receive(B, Swapped(2, 0, journal.digest, NEXT, {}), 9.0)
    assert [type(effect) for effect in effects] == [RecordCommitted, RoundReady]


def test_what_was_asked_of_the_round_after_a_record_that_is_dropped_does_not_end_the_one_before(
    machine: RoundCoordinatorMachine,
) -> None:
    effects = dropped(machine, 3)
    assert RoundReady(machine.tip, {B: 0}, {}) in effects
    assert sent(effects, Close) == {}
