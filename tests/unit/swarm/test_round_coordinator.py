"""The coordinator's part in the round where the simulation does not look: ballots, losses and times one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.ids import PeerId, StepKey
from shoal.swarm.codec_rule import CodecRule
from shoal.swarm.records import Tip, record_hash, seal, unseal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import (
    CoordinatorEffect,
    Deposed,
    Journal,
    RecordCommitted,
    ReplicaIn,
    ReplicaOut,
    RoundReady,
    Send,
    Stuck,
)
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_settings import CloseRequest, RoundPhase, RoundSettings
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    CommitRecord,
    Join,
    LinkReport,
    MemberLost,
    OrderNamed,
    Payload,
    PrepareRecord,
    Propose,
    Record,
    RecordName,
    RecordPrepared,
    RoundState,
    SignedRecord,
    Staged,
    StageHashes,
    StaleBallot,
    Swapped,
)
from shoal.wire.messages.step import StepEntry

ME, A, B = PeerId("C"), PeerId("a"), PeerId("b")
BYTES = StageHashes("p", "m", "b")
INITIAL = Basis(0, StageHashes("p0", "m0", "b0"))


def unsealed(signed: SignedRecord) -> Record:
    return unseal(signed, "run", lambda *_: None)


def coordinator(num_stages: int = 1, codecs: CodecRule | None = None) -> RoundCoordinatorMachine:
    settings = RoundSettings(
        "run", num_stages, "D0", retry_s=1.0, drop_after_s=5.0, stage_timeout_s=20.0, codecs=codecs
    )
    return RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)


@pytest.fixture
def machine() -> RoundCoordinatorMachine:
    return coordinator()


def sent(effects: list[CoordinatorEffect], kind: type[Any]) -> dict[PeerId, Any]:
    return {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


def state(
    machine: RoundCoordinatorMachine,
    record: SignedRecord | None = None,
    round: int = 0,
    *,
    stage: int = 0,
    refused: str = "",
    basis: Basis | None = None,
    prepared: SignedRecord | None = None,
) -> RoundState:
    basis = basis or (INITIAL if record is None else Basis(round, BYTES))
    return RoundState(machine.ballot, stage, round, record, prepared, Hop(A, ()), refused, basis)


def lead(machine: RoundCoordinatorMachine, *peers: PeerId) -> list[CoordinatorEffect]:
    machine.replicas({peer: Hop(peer, ()) for peer in peers}, 0.0)
    effects = machine.lead(0.0)
    assert sent(effects, AskRound).keys() == set(peers)
    for peer in peers:
        effects = machine.receive(peer, state(machine), 0.0)
    return effects


def close(
    machine: RoundCoordinatorMachine, *peers: PeerId, join_within_s: float | None = None
) -> list[CoordinatorEffect]:
    effects = machine.close(CloseRequest(1, {}, {}, join_within_s), 1.0)
    for peer in peers:
        effects = machine.receive(peer, Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0)
    return effects


def stage(machine: RoundCoordinatorMachine, *peers: PeerId, epoch: int = 0) -> list[CoordinatorEffect]:
    """Have everyone stage, and the step logs journaled if the record is to be prepared."""
    effects: list[CoordinatorEffect] = []
    for peer in peers:
        effects = machine.receive(peer, Staged(machine.ballot, 1, epoch, 0, BYTES), 2.0)
    return [send for effect in effects if isinstance(effect, Journal) for send in machine.journaled(effect.digest)]


def prepare(machine: RoundCoordinatorMachine, effects: list[CoordinatorEffect]) -> list[CoordinatorEffect]:
    result: list[CoordinatorEffect] = []
    for peer, message in sent(effects, PrepareRecord).items():
        result = machine.receive(peer, RecordPrepared(machine.ballot, 1, record_hash(message.record)), 3.0)
    return result


def test_a_whole_round(machine: RoundCoordinatorMachine) -> None:
    [ready] = lead(machine, A, B)
    assert ready == RoundReady(machine.tip, {A: 0, B: 0}, {})
    assert sent(machine.close(CloseRequest(1, {}, {}), 1.0), Close).keys() == {A, B}
    assert sent(close(machine, A, B), Propose).keys() == {A, B}
    preparing = stage(machine, A, B)
    assert machine.phase is RoundPhase.PREPARING
    record = sent(preparing, PrepareRecord)[A].record
    told = sent(prepare(machine, preparing), CommitRecord)
    digest = record_hash(record)
    by_name = CommitRecord(machine.ballot, None, known=RecordName(1, digest))
    assert told == {A: by_name, B: by_name}, "both have it"
    [committed] = machine.receive(A, Swapped(1, 0, digest, BYTES, {"state": 2}), 4.0)
    assert isinstance(committed, RecordCommitted)
    assert committed.signed == record
    [ready] = machine.receive(B, Swapped(1, 0, digest, BYTES, {"state": 3}), 4.0)
    assert ready == RoundReady(machine.tip, {A: 0, B: 0}, {"state": 5})
    assert machine.wake_at_s == math.inf


@pytest.mark.parametrize("keep", [True, False])
def test_a_record_says_whether_a_checkpoint_of_it_is_wanted(machine: RoundCoordinatorMachine, keep: bool) -> None:
    lead(machine, A)
    machine.close(CloseRequest(1, {}, {}, keep=keep), 1.0)
    machine.receive(A, Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0)
    [prepare] = sent(stage(machine, A), PrepareRecord).values()
    assert unsealed(prepare.record).keep == keep


@pytest.mark.parametrize(("trained_s", "codec"), [(30.0, "coarse"), (None, "fine")])
def test_a_record_names_the_codec_of_the_round_after_it(trained_s: float | None, codec: str) -> None:
    machine = coordinator(codecs=CodecRule({"fine": 1.0, "coarse": 0.1}))
    lead(machine, A, B)
    machine.close(CloseRequest(1, {}, {}, trained_s=trained_s), 1.0)
    for peer, other in ((A, B), (B, A)):
        links, payload = (LinkReport(other, 0.0, 0.001),), Payload("0" * 64, 10_000)
        machine.receive(peer, Join(machine.ballot, 1, 0, 0, (), (), (), links=links, payload=payload), 1.0)
    [prepare, _] = sent(stage(machine, A, B), PrepareRecord).values()
    assert unsealed(prepare.record).codec == codec


def test_a_record_that_nobody_has_swapped_to_is_not_committed_when_a_member_is_lost_first(
    machine: RoundCoordinatorMachine,
) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    preparing = stage(machine, A, B)
    prepare(machine, preparing)
    before = machine.lead(4.0)
    assert not any(isinstance(effect, RecordCommitted) for effect in before)
    # It is not forgotten: what the replicas have prepared is finished, under the new ballot.
    assert machine.tip.round == 0
    prepared = sent(preparing, PrepareRecord)[A].record
    machine.receive(A, state(machine, prepared=prepared), 5.0)
    assert machine.receive(B, state(machine, prepared=prepared), 5.0) != []
    assert machine.tip.round == 1


def test_the_record_is_not_committed_before_all_have_prepared_it(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    message = sent(stage(machine, A, B), PrepareRecord)[A]
    digest = record_hash(message.record)
    assert machine.receive(A, RecordPrepared(machine.ballot, 1, digest), 3.0) == []
    assert machine.receive(B, RecordPrepared(machine.ballot, 1, "another"), 3.0) == []
    assert machine.tip.round == 0
    assert machine.receive(B, RecordPrepared(machine.ballot, 1, digest), 3.0)
    assert machine.tip.round == 1


def test_nobody_prepares_a_record_before_its_step_logs_are_journaled(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    machine.receive(A, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    [journal] = machine.receive(B, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    assert isinstance(journal, Journal)
    assert journal.logs == {A: (0, ()), B: (0, ())}
    assert machine.journaled("another") == []
    assert sent(machine.journaled(journal.digest), PrepareRecord).keys() == {A, B}


def test_step_logs_that_are_journaled_too_late_have_no_effect(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    machine.receive(A, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    [journal] = machine.receive(B, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    machine.lost(B, 3.0)
    assert machine.journaled(journal.digest) == []


def test_a_member_lost_while_a_record_is_prepared_means_a_new_epoch_and_another_record(
    machine: RoundCoordinatorMachine,
) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    first = sent(stage(machine, A, B), PrepareRecord)[A].record
    effects = machine.lost(B, 3.0)
    [proposed] = sent(effects, Propose).values()
    assert (proposed.epoch, [hop.peer for hop in proposed.members]) == (1, [A])
    assert machine.receive(A, RecordPrepared(machine.ballot, 1, record_hash(first)), 3.0) == []
    second = sent(stage(machine, A, epoch=1), PrepareRecord)[A].record
    assert record_hash(second) != record_hash(first)


def test_unanswered_questions_are_repeated(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 1.0)
    assert machine.wake_at_s < math.inf
    assert sent(machine.tick(2.0), AskRound).keys() == {B}
    machine.receive(B, state(machine), 2.0)
    machine.close(CloseRequest(1, {}, {}), 3.0)
    machine.receive(A, Join(machine.ballot, 1, 0, 0, (), (), ()), 3.0)
    assert sent(machine.tick(4.0), Close).keys() == {B}


def test_late_replicas_are_waited_for_only_until_the_deadline(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, join_within_s=9.0)
    assert not sent(machine.tick(9.9), Propose)
    assert sent(machine.tick(10.0), Propose).keys() == {A}


def test_who_was_lost_while_the_round_ended_is_given_as_long_to_join_again(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B, join_within_s=9.0)
    machine.lost(A, 2.0)
    machine.lost(B, 2.0)
    machine.receive(B, state(machine), 100.0)
    machine.receive(A, state(machine), 100.0)
    assert not sent(machine.receive(A, Join(machine.ballot, 1, 0, 0, (), (), ()), 100.0), Propose)
    assert sent(machine.receive(B, Join(machine.ballot, 1, 0, 0, (), (), ()), 100.1), Propose).keys() == {A, B}


def test_a_quorum_that_does_not_end_is_proposed_anew(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    stage(machine, A)
    assert not sent(machine.tick(20.0), Propose)
    [proposed, _] = sent(machine.tick(30.0), Propose).values()
    assert proposed.epoch == 1


def test_a_member_that_reports_itself_is_out(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    close(machine, A, B)
    effects = machine.receive(B, MemberLost(machine.ballot, 1, 0, 0, B), 2.0)
    assert ReplicaOut(B, "its own state is not the record's") in effects
    assert sent(effects, Propose).keys() == {A}


def test_a_stage_without_anybody_is_reported_and_the_replicas_are_asked_again(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A)
    close(machine, A)
    machine.lost(A, 2.0)
    assert machine.phase is RoundPhase.ASKING
    machine.tick(3.0)
    effects = machine.receive(A, state(machine), 3.0)
    assert sent(effects, Close).keys() == {A}
    joined = machine.receive(A, Join(machine.ballot, 1, 0, 0, (), (), ()), 3.0)
    # Epochs count on, or what was staged for the first quorum could be taken for the second.
    assert sent(joined, Propose)[A].epoch == 1


def test_missing_stages_are_named() -> None:
    settings = RoundSettings("run", 3, "D0")
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    assert lead(machine, A) == [Stuck((1, 2))]


def prepared(machine: RoundCoordinatorMachine) -> SignedRecord:
    """Member A alone has prepared the record of round 1, which is committed then."""
    preparing = stage(machine, A)
    assert sent(prepare(machine, preparing), CommitRecord).keys() == {A}
    signed: SignedRecord = sent(preparing, PrepareRecord)[A].record
    return signed


def whole_round(machine: RoundCoordinatorMachine) -> SignedRecord:
    """Round 1 with member A alone; returns its record."""
    lead(machine, A)
    close(machine, A)
    signed = prepared(machine)
    machine.receive(A, Swapped(1, 0, record_hash(signed), BYTES, {}), 4.0)
    return signed


def newcomer(machine: RoundCoordinatorMachine, signed: SignedRecord) -> None:
    """B comes with D_0 and refuses the record, whose bytes it has not."""
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 5.0)
    effects = machine.receive(B, state(machine), 5.0)
    assert sent(effects, CommitRecord) == {B: CommitRecord(machine.ballot, signed)}
    refused = state(machine, refused="not yet")
    assert isinstance(machine.receive(B, refused, 5.0)[0], ReplicaOut)
    assert machine.holders == {A: 0}
    assert machine.wake_at_s == math.inf


@pytest.mark.parametrize(
    ("read", "marks"),
    [
        (b"held outwindow 0window 1", b"held outwindow 0window 1"),
        (b"", b"held outwindow 0"),
        (b"held outsomewhatother...", b"held outwindow 0"),
    ],
    ids=["read on", "not read yet", "another stream"],
)
def test_a_record_has_the_marks_of_the_one_before_and_those_that_follow(
    machine: RoundCoordinatorMachine, read: bytes, marks: bytes
) -> None:
    lead(machine, A)
    found: list[bytes] = []
    for round, known in ((1, b"held outwindow 0window 1"), (2, read)):
        machine.close(CloseRequest(round, {}, {}, marks=known), 1.0)
        samples = (SampleRange(round - 1, 0, 4),)
        log = (StepEntry(StepKey(0, 1, round, 0), (A,), 0, samples, 4, 4, 1.0, 0.1, False),)
        machine.receive(A, Join(machine.ballot, round, 0, 4, (), log, ()), 1.0)
        effects = machine.receive(A, Staged(machine.ballot, round, 0, 0, BYTES), 2.0)
        [journal] = [effect for effect in effects if isinstance(effect, Journal)]
        found.append(journal.record.marks)
        machine.journaled(journal.digest)
        machine.receive(A, RecordPrepared(machine.ballot, round, journal.digest), 3.0)
        machine.receive(A, Swapped(round, 0, journal.digest, BYTES, {}), 4.0)
    assert found == [b"held outwindow 0", marks]


def test_a_newcomer_is_a_holder_as_soon_as_it_says_so(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    newcomer(machine, signed)
    there = Swapped(1, 0, record_hash(signed), BYTES, {})
    assert machine.receive(B, there, 6.0) == [ReplicaIn(B)]
    assert machine.holders == {A: 0, B: 0}
    assert machine.receive(B, there, 6.0) == []


def test_a_newcomer_that_is_ready_while_others_join_is_closed_at_once(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    newcomer(machine, signed)
    machine.close(CloseRequest(2, {}, {}), 6.0)
    effects = machine.receive(B, Swapped(1, 0, record_hash(signed), BYTES, {}), 6.0)
    assert B in sent(effects, Close)


def test_a_newcomer_with_other_bytes_stays_out(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    newcomer(machine, signed)
    wrong = Swapped(1, 0, record_hash(signed), StageHashes("q", "m", "b"), {})
    assert any(isinstance(effect, ReplicaOut) for effect in machine.receive(B, wrong, 6.0))
    assert machine.holders == {A: 0}


def test_a_late_repetition_does_not_readmit_who_is_out(machine: RoundCoordinatorMachine) -> None:
    signed = whole_round(machine)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 5.0)
    machine.receive(B, state(machine, signed, 1), 5.0)
    machine.close(CloseRequest(2, {}, {}), 5.0)
    for peer in (A, B):
        machine.receive(peer, Join(machine.ballot, 2, 0, 0, (), (), ()), 5.0)
    machine.receive(B, state(machine, signed, 1, refused="why not"), 6.0)
    machine.receive(B, Swapped(1, 0, record_hash(signed), BYTES, {}), 6.0)
    assert machine.holders == {A: 0}


OTHER_START = Basis(0, StageHashes("p1", "m0", "b0"))


def test_who_has_computed_another_d_0_than_most_of_its_stage_takes_no_part_in_the_first_round() -> None:
    machine = coordinator()
    c = PeerId("c")
    machine.replicas({peer: Hop(peer, ()) for peer in (A, B, c)}, 0.0)
    machine.lead(0.0)
    machine.receive(A, state(machine, basis=OTHER_START), 0.0)
    machine.receive(B, state(machine), 0.0)
    effects = machine.receive(c, state(machine), 0.0)
    [out] = [effect for effect in effects if isinstance(effect, ReplicaOut)]
    assert out.peer == A
    assert "initial parameters" in out.reason
    [ready] = [effect for effect in effects if isinstance(effect, RoundReady)]
    assert ready.holders == {B: 0, c: 0}
    # It is said once, and is not closed with the others.
    assert not [e for e in machine.receive(A, state(machine, basis=OTHER_START), 0.5) if isinstance(e, ReplicaOut)]
    assert sent(machine.close(CloseRequest(1, {}, {}), 1.0), Close).keys() == {B, c}
    told = sent(prepare(machine, stage(machine, *close_by(machine, B, c))), CommitRecord)
    assert told.keys() == {A, B, c}


def close_by(machine: RoundCoordinatorMachine, *peers: PeerId) -> tuple[PeerId, ...]:
    for peer in peers:
        machine.receive(peer, Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0)
    return peers


def test_what_a_stage_has_begun_with_stays_as_long_as_somebody_has_it() -> None:
    machine = coordinator()
    lead(machine, A)
    c = PeerId("c")
    machine.replicas({peer: Hop(peer, ()) for peer in (A, B, c)}, 0.0)
    for peer in (B, c):
        effects = machine.receive(peer, state(machine, basis=OTHER_START), 0.5)
        assert [type(effect) for effect in effects if isinstance(effect, ReplicaIn | ReplicaOut)] == [ReplicaOut]
    assert machine.holders == {A: 0}
    effects = machine.lost(A, 1.0)
    assert {effect.peer for effect in effects if isinstance(effect, ReplicaIn)} == {B, c}
    assert machine.holders == {B: 0, c: 0}


def test_who_has_swapped_to_another_chain_is_closed_with_nobody_until_it_has_said_what_it_holds() -> None:
    machine = coordinator()
    lead(machine, A, B)
    close(machine, A, B)
    prepare(machine, stage(machine, A, B))
    for peer in (A, B):
        machine.receive(peer, Swapped(1, 0, machine.tip.hash, BYTES, {}), 4.0)
    assert machine.holders == {A: 0, B: 0}
    effects = machine.receive(A, Swapped(1, 0, "of another chain", StageHashes("q", "m", "b"), {}), 5.0)
    assert sent(effects, AskRound).keys() == {A}
    assert machine.holders == {B: 0}
    assert sent(machine.close(CloseRequest(2, {}, {}), 6.0), Close).keys() == {B}


def test_a_quorum_names_its_members_as_they_are_whoever_they_say_they_are(machine: RoundCoordinatorMachine) -> None:
    """Of the states here each has the name of A."""
    lead(machine, A, B)
    for propose in sent(close(machine, A, B), Propose).values():
        assert {hop.peer for hop in propose.members} == {A, B}


def test_of_many_replicas_not_all_are_looked_at_whenever_one_joins(
    machine: RoundCoordinatorMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = [PeerId(f"p{number:02}") for number in range(40)]
    lead(machine, *peers)
    machine.close(CloseRequest(1, {}, {}), 1.0)
    looked: list[Tip] = []
    holders = RoundReplicas.holders

    def counted(self: RoundReplicas, tip: Tip) -> dict[PeerId, int]:
        looked.append(tip)
        return holders(self, tip)

    monkeypatch.setattr(RoundReplicas, "holders", counted)
    for peer in peers[:-1]:
        assert machine.receive(peer, Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0) == []
    assert looked == []
    effects = machine.receive(peers[-1], Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0)
    assert sent(effects, OrderNamed).keys() == set(peers)


def test_a_replica_joins_for_the_stage_alone_that_it_has_named() -> None:
    machine, stages = coordinator(num_stages=2), {A: 0, B: 1, PeerId("c"): 0}
    machine.replicas({peer: Hop(peer, ()) for peer in stages}, 0.0)
    machine.lead(0.0)
    for peer, number in stages.items():
        machine.receive(peer, state(machine, stage=number), 0.0)
    machine.close(CloseRequest(1, {}, {}), 1.0)
    for peer in (A, B):
        machine.receive(peer, Join(machine.ballot, 1, stages[peer], 0, (), (), ()), 1.0)
    assert machine.receive(PeerId("c"), Join(machine.ballot, 1, 1, 0, (), (), ()), 1.0) == []
    effects = machine.receive(PeerId("c"), Join(machine.ballot, 1, 0, 0, (), (), ()), 1.0)
    assert {peer: quorum.stage for peer, quorum in sent(effects, Propose).items()} == stages


def test_only_who_was_asked_says_that_somebody_else_leads(machine: RoundCoordinatorMachine) -> None:
    lead(machine, A, B)
    highest = machine.ballot._replace(number=machine.ballot.number + 1, peer=PeerId("another"))
    assert machine.receive(PeerId("stranger"), StaleBallot(highest), 1.0) == []
    assert machine.phase is RoundPhase.IDLE
    assert machine.receive(A, StaleBallot(highest), 1.0) == [Deposed(highest)]
