"""A coordinator goes on from a record that no replica holds, since a checkpoint has its bytes."""

from __future__ import annotations

from tests.unit.swarm.test_round_coordinator import BYTES, INITIAL, ME, A, B, close, sent, state, unsealed

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash, seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Overtaken, Restored, RoundReady
from shoal.swarm.round_settings import RoundSettings
from shoal.wire.messages.base import Era, Hop, SampleRange
from shoal.wire.messages.mirror import HeldRecord, Mirrored
from shoal.wire.messages.round import CommitRecord, Propose, Record, StageOutcome, Swapped

BEFORE, M = PeerId("client before"), PeerId("m")
OUTCOME = StageOutcome(0, 0, (PeerId("x"), PeerId("y")), (4, 4), BYTES, 0)
RECORD = Record("run", 4, Ballot(7, BEFORE, 3), "D3", (OUTCOME,), (), (), {}, (), (Era(1, Ballot(7, BEFORE, 3)),))
SIGNED = seal(RECORD, BEFORE, lambda _: b"")
TIP = Tip(4, record_hash(SIGNED), SIGNED)


def resumed(*, keeps: bool = True) -> RoundCoordinatorMachine:
    settings = RoundSettings("run", 1, "D0", retry_s=1.0, lost_state_after_s=3.0)
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda r: seal(r, ME, lambda _: b""), unsealed, tip=TIP)
    if keeps:
        machine.keep(0, TIP)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    return machine


def test_newcomers_are_told_of_the_record_and_nothing_stands_before_one_has_its_bytes() -> None:
    machine = resumed()
    machine.receive(A, state(machine, basis=INITIAL), 0.0)
    effects = machine.receive(B, state(machine, basis=INITIAL), 0.0)
    assert sent(effects, CommitRecord).keys() == {A, B}
    # However long they take: the bytes are safe.
    for now_s in range(1, 60):
        effects = machine.tick(float(now_s))
        for peer in (A, B):
            effects += machine.receive(peer, state(machine, basis=INITIAL), float(now_s))
        assert not [e for e in effects if isinstance(e, Restored | RoundReady | Overtaken)]
    machine.receive(A, Swapped(4, 0, TIP.hash, BYTES, {}), 60.0)
    effects = machine.receive(A, state(machine, SIGNED, 4), 60.0)
    effects += machine.receive(B, state(machine, basis=INITIAL), 60.0)
    effects += machine.receive(B, Swapped(4, 0, TIP.hash, BYTES, {}), 61.0)
    effects += machine.receive(B, state(machine, SIGNED, 4), 61.0)
    [ready] = [effect for effect in effects if isinstance(effect, RoundReady)]
    assert ready.tip == TIP
    assert machine.tip == TIP


def test_a_record_whose_bytes_nobody_keeps_does_not_hold_up_the_run_for_ever() -> None:
    machine = resumed(keeps=False)
    found: list[Restored] = []
    for now_s in range(10):
        effects = machine.tick(float(now_s))
        for peer in (A, B):
            effects += machine.receive(peer, state(machine, basis=INITIAL), float(now_s))
        found += [effect for effect in effects if isinstance(effect, Restored)]
    assert [(each.stage, each.round, each.basis) for each in found] == [(0, 4, INITIAL)]


def test_its_ballot_is_above_that_of_the_record_and_the_next_record_goes_on_in_the_chain() -> None:
    machine = resumed()
    assert machine.ballot.number == 8
    for peer in (A, B):
        machine.receive(peer, state(machine, SIGNED, 4), 0.0)
    assert machine.tip == TIP
    assert machine.holders == {A: 0, B: 0}
    assert sent(close(machine), Propose) == {}


def test_a_mirror_that_has_not_answered_is_waited_for_before_anybody_is_told_of_the_record() -> None:
    machine = resumed()
    machine.mirrors({M: Hop(M, ())}, 0.0)
    for peer in (A, B):
        effects = machine.receive(peer, state(machine, basis=INITIAL), 0.0)
        assert sent(effects, CommitRecord) == {}
    assert sent(machine.tick(2.0), CommitRecord) == {}
    assert sent(machine.tick(3.0), CommitRecord).keys() == {A, B}, "not for ever"


def test_what_a_mirror_holds_that_is_newer_is_gone_on_from() -> None:
    machine = resumed()
    machine.mirrors({M: Hop(M, ())}, 0.0)
    for peer in (A, B):
        machine.receive(peer, state(machine, basis=INITIAL), 0.0)
    outcome = StageOutcome(0, 0, (A, B), (4, 4), BYTES, 0)
    ballot = Ballot(8, BEFORE, 4)
    eras = (*RECORD.eras, Era(5, ballot))
    newer = Record("run", 5, ballot, TIP.hash, (outcome,), (SampleRange(0, 0, 4),), (), {}, (), eras)
    signed = seal(newer, BEFORE, lambda _: b"")
    effects = machine.receive(M, Mirrored(machine.ballot, (HeldRecord(signed, (0,)),)), 1.0)
    assert {message.record for message in sent(effects, CommitRecord).values()} == {signed}
