"""Joins and the fate of steps in doubt."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import BYTES, ME, sent, state, unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm import records, round_joins, sample_ranges
from shoal.swarm.records import Tip, build_record, seal, used_samples
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Journal, ReplicaOut
from shoal.swarm.round_joins import Fate, RoundJoins
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.limits import WireLimits
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import (
    MAX_RECORD_BYTES,
    MAX_RECORDED,
    MAX_ROUND_RANGES,
    Close,
    Join,
    Propose,
    Record,
    RoundState,
    Staged,
    StageOutcome,
)
from shoal.wire.messages.step import StepEntry

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
KEY = StepKey(0, 1, 2, 0)
ENTRY = StepEntry(KEY, (A, B), 0, (SampleRange(0, 8, 12),), 4, 4, 0.5, 0.25, True)
ALONE = msgspec.structs.replace(ENTRY, path=(A,))
"""Of a model of one stage."""


def join(
    *,
    doubts: tuple[StepKey, ...] = (),
    log: tuple[StepEntry, ...] = (),
    aborted: tuple[StepKey, ...] = (),
    stage: int = 0,
) -> Join:
    return Join(Ballot(1, A, 1), 1, stage, 0, doubts, log, aborted)


def test_a_doubt_that_some_join_holds_is_committed_by_its_numbers() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(log=(ENTRY,)))
    assert joins.settle() == [(A, Fate(KEY, True, 0.5, 0.25, True))]
    assert joins.joins.keys() == {B}


def test_samples_in_more_pieces_than_a_record_could_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_joins, "MAX_RANGES", 8)
    joins = RoundJoins()
    pieces = tuple(SampleRange(0, 2 * number, 2 * number + 1) for number in range(9))
    joins.note(A, join(log=(msgspec.structs.replace(ENTRY, samples=pieces[1:]),)))
    with pytest.raises(RemoteProtocolError, match="in 9 pieces"):
        joins.note(B, join(log=(msgspec.structs.replace(ENTRY, samples=pieces),)))
    assert joins.joins.keys() == {A}


def test_a_doubt_that_nobody_holds_is_aborted() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(doubts=(KEY,)))
    assert joins.settle() == [(A, Fate(KEY, False, 0.0, 0.0, False)), (B, Fate(KEY, False, 0.0, 0.0, False))]


def test_a_later_join_that_contradicts_is_left_out() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.settle()
    joins.note(A, join())
    joins.note(B, join(log=(ENTRY,)))
    assert joins.leave_out() == {B: KEY}
    assert joins.joins.keys() == {A}


def test_who_has_aborted_by_another_coordinator_s_order_what_is_settled_as_committed_here_is_left_out() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(log=(ENTRY,), stage=1))
    joins.settle()
    joins.note(A, join(log=(ENTRY,)))
    joins.note(C, join(aborted=(KEY,)))
    assert joins.leave_out() == {C: KEY}
    assert joins.joins.keys() == {A, B}


@pytest.mark.parametrize("num_last", [1, 2])
def test_a_stage_of_which_all_contradict_keeps_them(num_last: int) -> None:
    joins = RoundJoins()
    last = (A, C)[:num_last]
    for peer in last:
        joins.note(peer, join(log=(ENTRY,)))
    joins.note(B, join(aborted=(KEY,), stage=1))
    assert joins.leave_out() == {}
    assert joins.joins.keys() == {*last, B}


def test_a_fate_stays_though_its_only_witness_is_lost() -> None:
    joins = RoundJoins()
    joins.note(A, join(doubts=(KEY,)))
    joins.note(B, join(log=(ENTRY,)))
    first = joins.settle()
    joins.restart()
    joins.note(A, join(doubts=(KEY,)))
    assert joins.settle() == first


@pytest.mark.parametrize("first", [A, B])
def test_what_an_earlier_coordinator_has_aborted_stays_so(first: PeerId) -> None:
    joins = RoundJoins()
    both = {A: join(aborted=(KEY,)), B: join(log=(ENTRY,))}
    for peer in sorted(both, key=lambda peer: peer != first):
        joins.note(peer, both[peer])
    assert joins.leave_out() == {B: KEY}
    assert joins.joins.keys() == {A}


def test_without_doubts_there_is_nothing_to_settle() -> None:
    joins = RoundJoins()
    joins.note(A, join(log=(ENTRY,)))
    assert joins.settle() == []
    assert joins.joins.keys() == {A}


def test_a_round_ends_though_the_last_of_its_stage_has_what_was_aborted_elsewhere() -> None:
    """A alone serves stage 0, and has committed a step that an earlier coordinator has aborted at B, of stage 1."""
    settings = RoundSettings("run", 2, "D0")
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    for stage, peer in enumerate((A, B)):
        machine.receive(peer, state(machine, stage=stage), 0.0)
    machine.close(CloseRequest(1, {}, {}), 1.0)
    machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (ENTRY,), ()), 1.0)
    effects = machine.receive(B, Join(machine.ballot, 1, 1, 0, (), (), (KEY,)), 1.0)
    assert sent(effects, Propose).keys() == {A, B}
    machine.receive(A, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    [journal] = machine.receive(B, Staged(machine.ballot, 1, 0, 1, BYTES), 2.0)
    assert isinstance(journal, Journal)
    assert journal.record.skipped == ENTRY.samples
    assert [outcome.steps_lost for outcome in journal.record.stages] == [0, 1]


def strange(*, stop: int = 64) -> StepEntry:
    return msgspec.structs.replace(ALONE, key=KEY._replace(number=9), samples=(SampleRange(1 << 20, 60, stop),))


def of_one_stage(*peers: PeerId) -> RoundCoordinatorMachine:
    """A coordinator that ends the first round of these replicas, over data of 62 samples."""
    settings = RoundSettings("run", 1, "D0")
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    machine.replicas({peer: Hop(peer, ()) for peer in peers}, 0.0)
    machine.lead(0.0)
    for peer in peers:
        machine.receive(peer, state(machine), 0.0)
    machine.close(CloseRequest(1, {}, {}, num_samples=62), 1.0)
    return machine


def test_who_joins_with_samples_that_the_data_do_not_have_is_left_out_and_told_of_once() -> None:
    machine = of_one_stage(A, B)
    machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (ALONE,), ()), 1.0)
    effects = machine.receive(B, Join(machine.ballot, 1, 0, 4, (), (strange(),), ()), 1.0)
    reason = "it has joined with samples up to 64, and the data have 62"
    assert [effect for effect in effects if isinstance(effect, ReplicaOut)] == [ReplicaOut(B, reason)]
    assert sent(effects, Propose).keys() == {A}
    again = machine.receive(B, Join(machine.ballot, 1, 0, 4, (), (strange(),), ()), 1.5)
    assert (again, sent(machine.tick(9.0), Close)) == ([], {}), "it is not asked again, nor said again"
    [journal] = machine.receive(A, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    assert isinstance(journal, Journal)
    assert journal.record.skipped == ENTRY.samples


@pytest.mark.parametrize(("stop", "kept"), [(64, {A, B, C}), (63, {A, C})])
def test_a_stage_of_which_all_name_samples_that_there_are_not_keeps_them(stop: int, kept: set[PeerId]) -> None:
    joins = RoundJoins()
    joins.note(A, join(log=(strange(stop=stop),)))
    joins.note(B, join(log=(strange(),)))
    joins.note(C, join(stage=1))
    assert joins.leave_out_strange(63).keys() == {A, B, C} - kept
    assert joins.joins.keys() == kept


@pytest.mark.parametrize("path", [(), (A, B)])
def test_who_joins_with_a_step_over_another_number_of_stages_breaks_the_protocol(path: tuple[PeerId, ...]) -> None:
    machine = of_one_stage(A)
    odd = msgspec.structs.replace(ALONE, path=path)
    with pytest.raises(RemoteProtocolError, match=f"over {len(path)} stages, the run has 1"):
        machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (odd,), ()), 1.0)


def scattered(number: int, first: int, num: int = 20) -> StepEntry:
    """A step that was made up: one sample here and there, of passes that nobody will come to soon."""
    samples = tuple(SampleRange(1000 + first + each, 0, 1) for each in range(num))
    return msgspec.structs.replace(ALONE, key=KEY._replace(number=number), samples=samples, skipped=False)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """A record that names 8 ranges of what is used."""
    for module in (round_joins, sample_ranges):
        monkeypatch.setattr(module, "MAX_RECORDED", 8)
    monkeypatch.setattr(records, "MAX_ROUND_RANGES", 8)
    return 8


@pytest.mark.usefixtures("narrow")
def test_who_joins_with_samples_behind_more_gaps_than_a_record_can_name_is_left_out() -> None:
    machine = of_one_stage(A, B)
    machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (ALONE,), ()), 1.0)
    effects = machine.receive(B, Join(machine.ballot, 1, 0, 4, (), (scattered(9, 0),), ()), 1.0)
    [out] = [effect for effect in effects if isinstance(effect, ReplicaOut)]
    assert (out.peer, out.reason) == (B, "it has joined with samples 0-1 of pass 1007, far from all others")
    assert sent(effects, Propose).keys() == {A}


@pytest.mark.usefixtures("narrow")
def test_many_passes_over_few_samples_are_nobody_s_lie() -> None:
    joins = RoundJoins()
    joins.note(A, join(log=tuple(scattered(number, number, 1) for number in range(4))))
    joins.note(B, join())
    assert joins.leave_out_scattered(scattered(0, -20).samples) == {}


@pytest.mark.usefixtures("narrow")
def test_the_last_of_its_stage_may_have_been_given_such_a_step_and_the_record_names_what_it_can() -> None:
    machine = of_one_stage(A)
    effects = machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (ALONE, scattered(9, 0)), ()), 1.0)
    assert sent(effects, Propose).keys() == {A}
    [journal] = machine.receive(A, Staged(machine.ballot, 1, 0, 0, BYTES), 2.0)
    assert isinstance(journal, Journal)
    assert journal.record.skipped == ALONE.samples
    assert journal.record.samples == scattered(9, 0).samples[:8]


def test_samples_that_are_made_up_never_make_a_record_too_long(narrow: int) -> None:
    """Round after round one replica, the only one of its stage, makes up others; what is really trained counts."""
    recorded: Ranges = ()
    for number in range(50):
        honest = msgspec.structs.replace(
            ALONE, key=KEY._replace(number=number), samples=(SampleRange(0, 4 * number, 4 * number + 4),), skipped=False
        )
        joins = {A: join(log=(honest, scattered(100 + number, 40 * number)))}
        record = build_record(
            run_id="run",
            previous=Tip(number, "before", None),
            ballot=Ballot(1, A, 1),
            quorums=[StageOutcome(0, 0, (A,), (4,), BYTES, 0)],
            joins=joins,
            recorded=recorded,
            generations={},
            restored={},
        )
        assert max(len(ranges) for ranges in (record.samples, record.recorded)) <= narrow
        assert record.samples[0] == honest.samples[0]
        recorded = used_samples(record)
        assert recorded[0] == SampleRange(0, 0, 4 * number + 4)
    assert len(recorded) == narrow


def test_a_record_of_as_many_ranges_as_it_may_have_fits_twice_into_a_message() -> None:
    far = SampleRange((1 << 32) - 1, (1 << 40) - 1, 1 << 40)
    longest = len(msgspec.msgpack.encode(far)) * (MAX_RECORDED + 2 * MAX_ROUND_RANGES)
    assert longest < MAX_RECORD_BYTES
    assert WireLimits().body_bytes_of(RoundState) > 2 * MAX_RECORD_BYTES


def test_a_record_that_names_more_is_none() -> None:
    each = tuple(SampleRange(number, 0, 1) for number in range(MAX_RECORDED + 1))
    record = Record("run", 1, Ballot(1, A, 1), "before", (), (), (), {}, recorded=each)
    signed = seal(record, A, lambda _: b"")
    with pytest.raises(RemoteProtocolError, match="no round record"):
        unsealed(signed)


def test_what_holders_of_a_step_say_differently_of_its_samples_is_all_used() -> None:
    """A liar names other samples for a step that others have trained: theirs are not free again."""
    others = msgspec.structs.replace(ENTRY, samples=(SampleRange(5, 0, 4),))
    for first, second in [(ENTRY, others), (others, ENTRY)]:
        record = build_record(
            run_id="run",
            previous=Tip(0, "before", None),
            ballot=Ballot(1, A, 1),
            quorums=[StageOutcome(stage, 0, (peer,), (4,), BYTES, 0) for stage, peer in enumerate((A, B))],
            joins={A: join(log=(first,)), B: join(log=(second,), stage=1)},
            recorded=(),
            generations={},
            restored={},
        )
        assert record.skipped == (*ENTRY.samples, *others.samples)
