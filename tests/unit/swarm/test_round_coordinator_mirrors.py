"""What the coordinator tells mirrors, and what it does not do while one holds newer bytes."""

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
    prepared,
    sent,
    state,
    whole_round,
)

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash, seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect, Deposed, Introduce, Restored, RoundReady
from shoal.swarm.round_settings import RoundPhase
from shoal.wire.messages.base import Era, Hop
from shoal.wire.messages.mirror import Follow, HeldRecord, Mirrored
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    CommitRecord,
    Record,
    Restore,
    SignedRecord,
    StageHashes,
    StageOutcome,
    StaleBallot,
    Swapped,
)

M, N = PeerId("M"), PeerId("N")


@pytest.fixture
def machine() -> RoundCoordinatorMachine:
    return coordinator()


def announce(machine: RoundCoordinatorMachine, *mirrors: PeerId, now_s: float = 0.0) -> list[CoordinatorEffect]:
    return machine.mirrors({peer: Hop(peer, ()) for peer in mirrors}, now_s)


def says(
    machine: RoundCoordinatorMachine, signed: SignedRecord | None, now_s: float = 6.0, peer: PeerId = M
) -> list[CoordinatorEffect]:
    held = () if signed is None else (HeldRecord(signed, (0,)),)
    return machine.receive(peer, Mirrored(machine.ballot, held), now_s)


def restored(effects: list[CoordinatorEffect]) -> list[CoordinatorEffect]:
    return [effect for effect in effects if isinstance(effect, Restored)]


def comes_back_without(machine: RoundCoordinatorMachine, now_s: float = 6.0) -> list[CoordinatorEffect]:
    """A, who alone held record 1, is there as the same peer again, with the initial bytes."""
    machine.lost(A, now_s)
    effects = machine.receive(A, state(machine), now_s)
    effects += machine.receive(A, state(machine, refused="it has not these bytes"), now_s)
    return effects + (machine.receive(A, state(machine), now_s) if machine.phase is RoundPhase.ASKING else [])


def successor(machine: RoundCoordinatorMachine, ballot: Ballot | None = None) -> SignedRecord:
    """A record 2 of the tip's chain, or one that another client has committed in its place."""
    ballot = ballot or machine.ballot
    outcome = StageOutcome(0, 0, (A,), (1,), StageHashes("p2", "", ""), 0)
    eras = (Era(1, machine.ballot), Era(2, ballot))
    return seal(
        Record("run", 2, ballot, machine.tip.hash, (outcome,), (), (), {}, (), eras), ballot.peer, lambda _: b""
    )


def test_a_mirror_is_asked_and_told_of_each_record_once_it_stands(machine: RoundCoordinatorMachine) -> None:
    assert announce(machine, M) == [Introduce(Hop(M, ()))]
    machine.replicas({A: Hop(A, ())}, 0.0)
    assert sent(machine.lead(0.0), Follow) == {M: Follow(machine.ballot, None)}
    assert sent(says(machine, None, 0.0), Follow) == {}
    machine.receive(A, state(machine), 0.0)
    close(machine, A)
    signed = prepared(machine)
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 4.0)
    assert sent(machine.tick(9.0), Follow) == {M: Follow(machine.ballot, signed)}, "repeated until it answers"
    says(machine, signed)
    assert sent(machine.tick(10.0), Follow) == {}


def test_a_record_that_is_only_prepared_is_told_to_no_mirror(machine: RoundCoordinatorMachine) -> None:
    announce(machine, M)
    lead(machine, A)
    says(machine, None, 0.0)
    close(machine, A)
    signed = prepared(machine)
    assert sent(machine.tick(5.0), Follow) == {}
    effects = machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 5.0)
    assert sent(effects, Follow) == {M: Follow(machine.ballot, signed)}


def test_a_client_that_leads_again_asks_mirrors_anew_what_others_have_committed_since(
    machine: RoundCoordinatorMachine,
) -> None:
    announce(machine, M)
    lead(machine, A)
    says(machine, None, 0.0)
    close(machine, A)
    effects = machine.receive(A, StaleBallot(machine.ballot._replace(peer=PeerId("z"))), 2.0)
    assert [type(effect) for effect in effects] == [Deposed]
    effects = lead(machine, A)
    assert effects == [], "M may hold what z has committed"
    assert any(isinstance(effect, RoundReady) for effect in says(machine, None, 3.0))


def test_no_stage_is_restored_whose_bytes_a_mirror_holds(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    says(machine, signed)
    effects = comes_back_without(machine)
    assert sent(effects, CommitRecord).keys() == {A}, "it is to fetch them"
    assert restored(effects) == []
    assert restored(machine.tick(1000.0)) == []
    effects = machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 1000.0)
    assert machine.holders == {A: 0}


def test_a_mirror_that_has_not_answered_makes_a_loss_uncertain_but_is_waited_for_no_longer_than_for_a_replica(
    machine: RoundCoordinatorMachine,
) -> None:
    whole_round(machine)
    announce(machine, M, now_s=5.0)
    assert restored(comes_back_without(machine)) == []
    assert machine.wake_at_s < math.inf
    assert restored(machine.tick(35.9)) == []
    machine.tick(36.0)
    assert restored(machine.receive(A, state(machine), 36.0)) == [Restored(0, 1, INITIAL)]


@pytest.mark.parametrize("how", ["its connection ends", "it is announced no more"])
def test_a_mirror_that_is_gone_counts_no_more(machine: RoundCoordinatorMachine, how: str) -> None:
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    says(machine, signed)
    comes_back_without(machine)
    if how == "its connection ends":
        machine.lost(M, 7.0)
        assert sent(machine.tick(8.0), Follow).keys() == {M}, "and is asked again"
        now_s = 36.0
    else:
        announce(machine, now_s=7.0)
        now_s = 7.0
    machine.tick(now_s)
    assert restored(machine.receive(A, state(machine), now_s)) == [Restored(0, 1, INITIAL)]


def test_a_mirror_that_held_the_bytes_until_just_now_is_waited_for_anew(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    comes_back_without(machine)
    says(machine, signed, 20.0)
    machine.lost(M, 21.0)
    for now_s, effects in ((49.9, []), (50.0, [Restored(0, 1, INITIAL)])):
        machine.tick(now_s)
        assert restored(machine.receive(A, state(machine), now_s)) == effects


def older_mirrored(machine: RoundCoordinatorMachine) -> tuple[SignedRecord, SignedRecord]:
    """Record 2 stands and A, who alone held it, has lost it; a mirror holds record 1."""
    first = whole_round(machine)
    second = successor(machine)
    own = Basis(2, StageHashes("p2", "", ""))
    machine.receive(A, state(machine, second, 2, basis=own), 5.0)
    machine.receive(A, state(machine, second, 2, basis=own), 5.0)
    assert machine.tip.round == 2
    announce(machine, M, now_s=5.0)
    says(machine, first)
    return first, second


def test_newcomers_get_the_older_bytes_that_a_mirror_holds_before_the_stage_is_restored_from_them(
    machine: RoundCoordinatorMachine,
) -> None:
    first, second = older_mirrored(machine)
    machine.lost(A, 6.0)
    effects = machine.receive(A, state(machine), 6.0)
    told = [
        each.message.record
        for each in effects
        if getattr(each, "peer", None) == A and isinstance(getattr(each, "message", None), CommitRecord)
    ]
    assert told[-1] == first
    assert restored(machine.receive(A, state(machine, refused="not these bytes"), 6.0)) == []
    assert restored(machine.tick(100.0)) == []
    assert first in [message.record for message in sent(machine.tick(101.0), CommitRecord).values()], "again and again"
    machine.receive(A, Swapped(1, 0, record_hash(first), BYTES, {}), 102.0)
    machine.receive(A, state(machine, first, 1, refused="not these bytes"), 102.0)
    assert restored(machine.receive(A, state(machine, first, 1), 102.0)) == [], "the mirror may hold newer ones by now"
    effects = says(machine, first, now_s=102.0)
    assert Restored(0, 2, Basis(1, BYTES)) in effects
    assert sent(effects, Restore) == {A: Restore(machine.ballot, second, 0, Basis(1, BYTES))}


def test_what_the_client_keeps_is_kept_as_by_a_mirror(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    machine.keep(0, Tip(1, record_hash(signed), signed))
    assert restored(comes_back_without(machine)) == []
    assert restored(machine.tick(1000.0)) == []
    machine.keep(0, None)
    machine.tick(1001.0)
    assert restored(machine.receive(A, state(machine), 1001.0)) == [Restored(0, 1, INITIAL)]


def test_newcomers_alone_do_not_begin_anew_while_a_mirror_holds_a_record() -> None:
    signed = whole_round(coordinator())
    machine = coordinator()
    announce(machine, M)
    assert lead(machine, A) == [], "the mirror may know of a record"
    effects = says(machine, signed, 0.1)
    assert sent(effects, CommitRecord) == {A: CommitRecord(machine.ballot, signed)}
    assert machine.phase is RoundPhase.ASKING
    machine.receive(A, state(machine, signed, 1), 1.0)
    [ready] = machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 1.0)
    assert isinstance(ready, RoundReady)
    assert ready.tip.hash == record_hash(signed)


def test_a_frozen_mirror_holds_up_the_beginning_no_longer_than_a_lost_replica_would() -> None:
    machine = coordinator()
    announce(machine, M)
    lead(machine, A)
    assert not any(isinstance(effect, RoundReady) for effect in machine.tick(29.9))
    assert any(isinstance(effect, RoundReady) for effect in machine.tick(30.0))


def test_what_a_mirror_alone_holds_is_gone_on_from_when_the_other_mirrors_were_waited_for() -> None:
    first = whole_round(coordinator())
    machine = coordinator()
    announce(machine, M, N)
    lead(machine, A)
    assert sent(says(machine, first, 0.1), CommitRecord) == {}, "the other one may hold a newer record"
    assert sent(machine.tick(29.9), CommitRecord) == {}
    assert sent(machine.tick(30.0), CommitRecord) == {A: CommitRecord(machine.ballot, first)}


@pytest.mark.parametrize("is_prepared", [False, True])
def test_what_a_replica_holds_is_gone_on_from_while_mirrors_are_silent(is_prepared: bool) -> None:
    first = whole_round(coordinator())
    machine = coordinator()
    announce(machine, M)
    machine.replicas({A: Hop(A, ())}, 0.0)
    machine.lead(0.0)
    said = state(machine, prepared=first) if is_prepared else state(machine, first, 1)
    machine.receive(A, said, 0.0)
    assert machine.tip.hash == record_hash(first)


def test_a_newer_record_that_a_mirror_holds_is_chosen(machine: RoundCoordinatorMachine) -> None:
    whole_round(machine)
    announce(machine, M, now_s=5.0)
    second = successor(machine)
    before = machine.ballot
    effects = says(machine, second)
    assert sent(effects, AskRound).keys() == {A}
    assert machine.ballot > before
    first = machine.tip.signed
    assert first is not None
    effects = machine.receive(A, state(machine, first, 1), 6.0)
    assert sent(effects, CommitRecord)[A].record == second


def test_a_mirror_of_another_chain_is_told_that_this_one_was_chosen_in_its_place(
    machine: RoundCoordinatorMachine,
) -> None:
    whole_round(machine)
    announce(machine, M, now_s=5.0)
    other = successor(coordinator(), Ballot(7, B, 1))  # on top of a D_0 that is none of this chain's records
    says(machine, other)
    first = machine.tip.signed
    assert first is not None
    effects = machine.receive(A, state(machine, first, 1), 6.0)
    assert sent(effects, Follow) == {M: Follow(machine.ballot, first, record_hash(other))}
    assert sent(says(machine, other), Follow) == {}, "once"
    assert machine.phase is RoundPhase.IDLE


def test_late_answers_of_a_mirror_take_nothing_back(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    says(machine, signed)
    says(machine, None)
    assert restored(comes_back_without(machine)) == []
    assert restored(machine.tick(1000.0)) == []


def test_a_mirror_that_follows_another_client_deposes_nobody(machine: RoundCoordinatorMachine) -> None:
    announce(machine, M)
    lead(machine, A)
    higher = Ballot(9, B, 1)
    assert not any(isinstance(each, Deposed) for each in machine.receive(M, StaleBallot(higher), 0.0))
    assert machine.phase is not RoundPhase.WAITING
    machine.lead(1.0)
    assert machine.ballot.number == 10, "but the next ballot is above that"


def test_a_mirror_that_has_answered_is_asked_again_as_long_as_a_stage_is_missing(
    machine: RoundCoordinatorMachine,
) -> None:
    """It follows another client, and what it fetches it tells that one."""
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    says(machine, None)
    assert sent(machine.tick(6.0), Follow) == {}
    machine.lost(A, 7.0)
    assert sent(machine.tick(8.0), Follow) == {M: Follow(machine.ballot, signed)}
    says(machine, signed, 8.0)
    assert sent(machine.tick(9.0), Follow) == {M: Follow(machine.ballot, signed)}


def test_a_mirror_that_has_answered_is_asked_again_as_long_as_a_replica_is_waited_for(
    machine: RoundCoordinatorMachine,
) -> None:
    """It may have followed another client meanwhile, and hold what that has recorded."""
    announce(machine, M)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    says(machine, None)
    machine.receive(A, state(machine, None, 0), 0.1)
    assert machine.phase is RoundPhase.ASKING
    assert sent(machine.tick(1.0), Follow) == {M: Follow(machine.ballot, None)}


def test_the_record_s_own_bytes_end_a_restoration_if_a_mirror_comes_with_them_before_the_quorums(
    machine: RoundCoordinatorMachine,
) -> None:
    signed = whole_round(machine)
    assert restored(comes_back_without(machine)) == [Restored(0, 1, INITIAL)]
    machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 7.0)
    announce(machine, M, now_s=8.0)
    effects = says(machine, signed, 8.0)
    assert restored(effects) == [Restored(0, 1, None)]
    assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, Basis(1, BYTES))}
    machine.receive(A, state(machine, signed, 1, refused="it fetches them", basis=INITIAL), 8.0)
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 9.0)
    assert machine.holders == {A: 0}


def test_who_swaps_as_it_was_told_before_a_mirror_came_is_told_of_the_own_bytes(
    machine: RoundCoordinatorMachine,
) -> None:
    signed = whole_round(machine)
    comes_back_without(machine)
    announce(machine, M, now_s=8.0)
    assert restored(says(machine, signed, 8.0)) == [Restored(0, 1, None)]
    effects = machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 8.0)
    assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, Basis(1, BYTES))}
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 9.0)
    assert machine.holders == {A: 0}


def test_who_has_yet_to_answer_is_told_of_the_own_bytes_with_which_a_mirror_comes() -> None:
    first = coordinator()
    signed = whole_round(first)
    comes_back_without(first)
    # A client takes over when the stage goes on from the initial bytes, and tells A of the record.
    machine = coordinator()
    announce(machine, M)
    machine.replicas({A: Hop(A, ())}, 0.0)
    machine.lead(0.0)
    says(machine, None, 0.0)
    machine.receive(A, state(machine, signed, 1, basis=INITIAL), 0.0)
    effects = says(machine, signed, 1.0)
    assert sent(effects, Restore) == {A: Restore(machine.ballot, signed, 0, Basis(1, BYTES))}
    machine.receive(A, Swapped(1, 0, record_hash(signed), INITIAL.hashes, {}), 1.0)
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 2.0)
    assert machine.holders == {A: 0}


@pytest.mark.parametrize("stages", [(1,), (-1,), (0, 0)])
def test_what_cannot_be_mirrored_is_refused(machine: RoundCoordinatorMachine, stages: tuple[int, ...]) -> None:
    signed = whole_round(machine)
    announce(machine, M, now_s=5.0)
    with pytest.raises(RemoteProtocolError, match="mirrors stage"):
        machine.receive(M, Mirrored(machine.ballot, (HeldRecord(signed, stages),)), 6.0)


def test_who_is_no_mirror_is_not_believed(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    assert says(machine, signed, peer=N) == []
    assert restored(comes_back_without(machine)) == [Restored(0, 1, INITIAL)]
