"""Joins and the fate of steps in doubt."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.swarm.test_round_coordinator import BYTES, ME, sent, state, unsealed

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm import round_joins
from shoal.swarm.records import seal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Journal, ReplicaOut
from shoal.swarm.round_joins import Fate, RoundJoins
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import Close, Join, Propose, Staged
from shoal.wire.messages.step import StepEntry

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
KEY = StepKey(0, 1, 2, 0)
ENTRY = StepEntry(KEY, (A, B), 0, (SampleRange(0, 8, 12),), 4, 4, 0.5, 0.25, True)


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
    return msgspec.structs.replace(ENTRY, key=KEY._replace(number=9), samples=(SampleRange(1 << 20, 60, stop),))


def test_who_joins_with_samples_that_the_data_do_not_have_is_left_out_and_told_of_once() -> None:
    settings = RoundSettings("run", 1, "D0")
    machine = RoundCoordinatorMachine(ME, 1, settings, lambda record: seal(record, ME, lambda _: b""), unsealed)
    machine.replicas({A: Hop(A, ()), B: Hop(B, ())}, 0.0)
    machine.lead(0.0)
    for peer in (A, B):
        machine.receive(peer, state(machine), 0.0)
    machine.close(CloseRequest(1, {}, {}, num_samples=62), 1.0)
    machine.receive(A, Join(machine.ballot, 1, 0, 4, (), (ENTRY,), ()), 1.0)
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
