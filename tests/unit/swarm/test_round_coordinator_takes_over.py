"""A coordinator takes the round over: which ballots it takes, whom it hears, what it believes of what it has heard."""

from __future__ import annotations

import math

import pytest
from tests.unit.swarm.test_round_coordinator import BYTES, ME, A, B, coordinator, lead, sent, state, unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.records import record_hash, seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Deposed, Overtaken, RoundReady, Send, Stuck
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import AskRound, CommitRecord, Record, SignedRecord, StageOutcome, StaleBallot, Swapped


@pytest.fixture
def machine() -> RoundCoordinatorMachine:
    return coordinator()


def test_a_replica_that_swaps_while_a_coordinator_takes_over_is_asked_again(machine: RoundCoordinatorMachine) -> None:
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine), 0.0)
    assert machine.phase is RoundPhase.ASKING
    assert machine.receive(A, Swapped(4, 0, "another", BYTES, {}), 1.0) == [Send(A, AskRound(machine.ballot))]


def test_who_holds_the_record_that_a_new_coordinator_finds_says_again_what_it_has_sent(
    machine: RoundCoordinatorMachine,
) -> None:
    outcome = StageOutcome(0, 0, (A, B), (4, 4), BYTES, 0)
    record = Record("run", 1, Ballot(1, ME, 0), "D0", (outcome,), (), (), {})
    signed = seal(record, ME, lambda _: b"")
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine, signed, 1), 0.0)
    effects = machine.receive(B, state(machine, signed, 1), 0.0)
    assert sent(effects, CommitRecord).keys() == {A, B}
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {"state": 2}), 0.0)
    [ready] = machine.receive(B, Swapped(1, 0, record_hash(signed), BYTES, {"state": 3}), 0.0)
    assert ready == RoundReady(machine.tip, {A: 0, B: 0}, {"state": 5})


def test_a_ballot_after_which_nobody_could_lead_is_believed_of_nobody(machine: RoundCoordinatorMachine) -> None:
    machine.replicas({A: Hop(A, ())}, 0.0)
    machine.mirrors({B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    before = machine.ballot
    for peer in (A, B):
        with pytest.raises(RemoteProtocolError, match="names ballot"):
            machine.receive(peer, StaleBallot(Ballot((1 << 62) - 1, ME, 7)), 0.0)
    assert machine.ballot == before
    assert machine.highest <= before


def test_nothing_is_chosen_before_every_reachable_replica_has_answered(machine: RoundCoordinatorMachine) -> None:
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    assert machine.receive(A, state(machine), 0.0) == []
    assert machine.phase is RoundPhase.ASKING
    assert isinstance(machine.lost(B, 0.0)[-1], RoundReady)


def test_who_could_not_be_reached_before_is_waited_for_under_the_next_ballot(machine: RoundCoordinatorMachine) -> None:
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.lost(B, 0.0)
    machine.lead(1.0)
    assert machine.receive(A, state(machine), 1.0) == []
    assert isinstance(machine.lost(B, 2.0)[-1], RoundReady)


def test_while_taking_over_a_higher_ballot_is_overtaken(machine: RoundCoordinatorMachine) -> None:
    machine.replicas({A: Hop(A, ())}, 0.0)
    machine.lead(0.0)
    effects = machine.receive(A, StaleBallot(Ballot(7, PeerId("other"), 3)), 0.0)
    assert machine.ballot == Ballot(8, ME, 1)
    assert sent(effects, AskRound) == {A: AskRound(machine.ballot)}


def test_clients_that_take_over_at_the_same_time_overtake_each_other_once_and_then_wait() -> None:
    """Two of them that answer at once with a higher ballot, as fast as messages travel, may never end."""
    waits_s: list[float] = []
    for me, other in ((ME, PeerId("D")), (PeerId("D"), ME)):
        settings = RoundSettings("run", 1, "D0", retry_s=1.0)
        machine = RoundCoordinatorMachine(me, 1, settings, lambda r: seal(r, ME, bytes), unsealed)
        machine.replicas({A: Hop(A, ())}, 0.0)
        machine.lead(0.0)
        assert sent(machine.receive(A, StaleBallot(Ballot(2, other, 3)), 0.0), AskRound).keys() == {A}
        assert machine.receive(A, StaleBallot(Ballot(4, other, 3)), 0.0) == []
        assert machine.receive(A, StaleBallot(Ballot(5, other, 3)), 0.0) == []
        assert machine.receive(A, state(machine), 0.0) == [], "what was asked under a ballot that is given up"
        machine.close(CloseRequest(1, {}, {}), 0.1)
        assert machine.tick(0.5) == []
        assert machine.wake_at_s < math.inf
        waits_s.append(machine.wake_at_s)
        assert sent(machine.tick(waits_s[-1]), AskRound) == {A: AskRound(Ballot(6, me, 1))}
        assert isinstance(machine.receive(A, state(machine), 9.0)[0], RoundReady)
    assert all(1.0 < wait_s < 5.0 for wait_s in waits_s)
    assert waits_s[0] != waits_s[1]


def test_who_wins_the_lead_back_does_not_go_on_in_a_round_that_the_other_one_may_have_trained(
    machine: RoundCoordinatorMachine,
) -> None:
    lead(machine, A)
    machine.lead(1.0)
    machine.receive(A, StaleBallot(Ballot(7, PeerId("other"), 3)), 1.0)
    effects = machine.receive(A, state(machine), 1.0)
    assert [type(effect) for effect in effects] == [Overtaken, RoundReady]
    machine.lead(2.0)
    [ready] = machine.receive(A, state(machine), 2.0)
    assert isinstance(ready, RoundReady), "who only asks once more has lost nothing"


def test_a_leader_yields_to_another_client_but_not_to_its_past_self(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A)
    machine.receive(A, StaleBallot(Ballot(4, ME, 0)), 1.0)
    assert (machine.ballot.number, machine.phase) == (5, RoundPhase.ASKING)
    machine.receive(A, state(machine), 1.0)
    higher = Ballot(9, PeerId("other"), 1)
    assert machine.receive(A, StaleBallot(higher), 1.0) == [Deposed(higher)]
    assert machine.receive(A, state(machine), 1.0) == []
    assert machine.wake_at_s == math.inf


def test_a_client_that_led_before_it_was_started_again_yields_to_whoever_leads_now() -> None:
    settings = RoundSettings("run", 1, "D0")
    machine = RoundCoordinatorMachine(ME, 2, settings, lambda r: seal(r, ME, bytes), unsealed, ballot_number=4)
    machine.replicas({A: Hop(A, ())}, 0.0)
    effects = machine.lead(0.0)
    assert sent(effects, AskRound) == {A: AskRound(Ballot(5, ME, 2))}, "above the one that it had"
    assert sent(machine.receive(A, StaleBallot(Ballot(6, ME, 1)), 0.0), AskRound) == {A: AskRound(Ballot(7, ME, 2))}
    assert machine.receive(A, StaleBallot(Ballot(4, PeerId("other"), 1)), 0.0) == [], "that one is behind"
    higher = Ballot(9, PeerId("other"), 1)
    assert machine.receive(A, StaleBallot(higher), 0.0) == [Deposed(higher)]


def test_a_refusal_of_a_ballot_given_up_long_ago_is_ignored(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A)
    assert machine.receive(A, StaleBallot(Ballot(0, PeerId("other"), 1)), 1.0) == []
    assert machine.phase is RoundPhase.IDLE


def test_a_newer_record_is_heard_by_a_new_ballot(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A)
    newer = seal(Record("run", 3, Ballot(1, ME, 0), "D2", (), (), (), {}), ME, lambda _: b"")
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 1.0)
    effects = machine.receive(B, state(machine, newer, 3), 1.0)
    assert machine.ballot.number == 2
    assert sent(effects, AskRound).keys() == {A, B}


def test_what_a_late_replica_has_prepared_is_finished_and_not_passed_over(
    machine: RoundCoordinatorMachine,
) -> None:
    """Another coordinator may have committed it, and be gone together with all but this one who know."""
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    first = seal(Record("run", 1, Ballot(1, ME, 0), "D0", (), (), (), {}), ME, lambda _: b"")
    machine.receive(A, state(machine, first, 1), 0.0)
    machine.lost(B, 0.0)
    assert machine.tip.round == 1
    prepared = seal(Record("run", 2, Ballot(1, ME, 0), record_hash(first), (), (), (), {}), ME, lambda _: b"")
    effects = machine.receive(B, state(machine, first, 1, prepared=prepared), 1.0)
    assert sent(effects, AskRound).keys() == {A, B}
    machine.receive(A, state(machine, first, 1), 1.0)
    machine.receive(B, state(machine, first, 1, prepared=prepared), 1.0)
    assert machine.tip.hash == record_hash(prepared)


def test_a_record_that_was_heard_of_stands_though_all_who_hold_it_are_lost_before_the_choice() -> None:
    machine = coordinator(num_stages=2)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    outcomes = tuple(StageOutcome(stage, 0, (A,), (1,), BYTES, 0) for stage in (0, 1))
    first = seal(Record("run", 1, Ballot(1, ME, 0), "D0", outcomes, (), (), {}), ME, lambda _: b"")
    second = seal(Record("run", 2, Ballot(1, ME, 0), record_hash(first), outcomes, (), (), {}), ME, lambda _: b"")
    machine.receive(A, state(machine, second, 2), 0.0)
    machine.lost(A, 1.0)
    machine.receive(B, state(machine, first, 1, stage=1), 2.0)
    machine.receive(A, state(machine), 3.0)  # its next generation
    machine.tick(3.0 + machine.settings.lost_state_after_s + 1.0)
    assert machine.tip.hash == record_hash(second), "that somebody has swapped to it shows that it was committed"


def test_what_was_heard_of_and_dropped_is_no_reason_to_ask_again() -> None:
    machine = coordinator(num_stages=2)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    first = seal(Record("run", 1, Ballot(1, ME, 0), "D0", (), (), (), {}), ME, lambda _: b"")
    prepared = seal(Record("run", 2, Ballot(1, ME, 0), record_hash(first), (), (), (), {}), ME, lambda _: b"")
    machine.receive(A, state(machine, first, 1), 0.0)
    machine.receive(B, state(machine, first, 1, stage=1, prepared=prepared), 4.0)
    machine.tick(6.0)
    assert machine.phase is RoundPhase.ASKING, "of what is named anew the others are waited for"
    machine.tick(9.5)
    assert machine.tip.hash == record_hash(first), "stage 0 has no bytes of the other one"
    asked = machine.receive(B, state(machine, first, 1, stage=1, prepared=prepared), 10.0)
    assert sent(asked, AskRound) == {}


def test_who_has_refused_a_ballot_can_be_reached_and_is_heard_before_anything_is_chosen() -> None:
    machine = coordinator(num_stages=1)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.lost(B, 0.1)
    assert sent(machine.receive(B, StaleBallot(Ballot(7, PeerId("other"), 3)), 0.2), AskRound).keys() == {A, B}
    assert machine.receive(A, state(machine), 0.3) == [], "the other one is there again, and may hold a record"
    assert isinstance(machine.lost(B, 0.4)[-1], RoundReady)


def test_what_nobody_holds_is_waited_for_once_however_many_clients_take_over() -> None:
    """Else each contest would make the run stand still for `drop_after_s` more."""
    machine = coordinator(num_stages=2)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    first = seal(Record("run", 1, Ballot(1, ME, 0), "D0", (), (), (), {}), ME, lambda _: b"")
    prepared = seal(Record("run", 2, Ballot(1, ME, 0), record_hash(first), (), (), (), {}), ME, lambda _: b"")
    machine.lead(0.0)
    machine.receive(B, state(machine, first, 1, stage=1, prepared=prepared), 0.0)
    for number, now_s in ((5, 1.0), (8, 2.0)):
        machine.receive(A, StaleBallot(Ballot(number, PeerId("other"), 3)), now_s)
    assert machine.wake_at_s < math.inf
    assert 2.0 < machine.wake_at_s < 5.0
    machine.tick(machine.wake_at_s)
    machine.receive(A, state(machine, first, 1), 5.5)
    machine.receive(B, state(machine, first, 1, stage=1, prepared=prepared), 5.5)
    assert machine.tip.hash == record_hash(first), "it was named 5.5 s ago, and the limit is 5 s"


def test_a_client_that_was_cut_off_from_everybody_waits_again_for_those_who_come_back_last() -> None:
    machine = coordinator(num_stages=2)
    hosts = [PeerId(name) for name in ("a", "b", "c", "d")]
    machine.replicas({peer: Hop(peer, ()) for peer in hosts}, 0.0)
    ours, larger = (
        seal(Record("run", 1, ballot, "D0", (), (SampleRange(0, 0, num),), (), {}), ballot.peer, lambda _: b"")
        for ballot, num in ((Ballot(1, ME, 0), 4), (Ballot(1, PeerId("other"), 0), 9))
    )

    def answer(peer: PeerId, now_s: float, prepared: SignedRecord | None = None) -> None:
        record, stage = (ours if peer in hosts[:2] else larger), hosts.index(peer) % 2
        machine.receive(peer, state(machine, record, 1, stage=stage, prepared=prepared), now_s)

    machine.lead(0.0)
    above = seal(Record("run", 2, Ballot(2, ME, 0), record_hash(larger), (), (), (), {}), ME, lambda _: b"")
    for peer in hosts:
        answer(peer, 0.0, above if peer == hosts[3] else None)
    assert machine.phase is RoundPhase.ASKING, "what d has prepared is waited for"
    for peer in hosts:
        machine.lost(peer, 1.0)
    for peer in (hosts[2], *hosts[:2]):
        answer(peer, 7.0)
    machine.tick(7.0)
    assert machine.phase is RoundPhase.ASKING, "the larger chain lacks d, who may be about to be back"
    answer(hosts[3], 8.0)
    assert machine.tip.hash == record_hash(larger)


def test_the_stage_that_lacks_a_holder_is_told_once_what_to_look_for() -> None:
    machine = coordinator(num_stages=2)
    first = Record("run", 1, Ballot(1, ME, 1), "D0", (), (), (), {})
    signed = seal(first, ME, lambda _: b"")
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine, signed, 1), 0.0)
    fresh = state(machine, stage=1)
    effects = machine.receive(B, fresh, 0.0)
    assert effects == [Stuck((1,)), Send(B, CommitRecord(machine.ballot, signed))]
    assert machine.holders is None
    assert machine.receive(B, fresh, 0.1) == []
