"""What a pseudo-gradient counts: as it is, clipped to a bound that the others' lengths give, or not at all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.contribution_guard import Suspect, Suspicion, scales_of, suspects
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import Tip, build_record
from shoal.swarm.round_quorums import StageQuorum, first_quorum
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Join, Record, StageHashes
from shoal.wire.messages.step import StepEntry, StepsTrained

BALLOT = Ballot(1, PeerId("C"), 1)
BYTES, OTHER = StageHashes("p", "m", "b"), StageHashes("p", "m", "other")
A, B, C, D = (PeerId(name) for name in "abcd")


def join(norm: float, num_steps: int = 4, *, skipped: int = 0, trainer: int = 0, stage: int = 0) -> Join:
    log = tuple(
        StepEntry(
            key=StepKey(trainer, 1, number, 0),
            path=(A, B),
            version=0,
            samples=(SampleRange(0, 100 * trainer + number, 100 * trainer + number + 1),),
            num_samples=1,
            num_targets=1,
            scale=1.0,
            lr=0.1,
            skipped=number < skipped,
        )
        for number in range(num_steps)
    )
    return Join(BALLOT, 1, stage, num_steps, (), log, (), gradient_norm=norm)


def joins(*norms: float, num_steps: int = 4) -> dict[PeerId, Join]:
    return {PeerId(chr(97 + index)): join(norm, num_steps, trainer=index) for index, norm in enumerate(norms)}


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_is_not_finite_does_not_count_however_few_there_are(norm: float, others: int) -> None:
    assert scales_of(joins(norm, *[1.0] * others), 10.0) == {A: 0.0}
    assert scales_of(joins(norm, *[1.0] * others), None) == {A: 0.0}


def test_who_has_trained_behind_its_cut_alone_and_is_not_finite_loses_that() -> None:
    behind = {A: join(math.nan, 4, skipped=2), B: join(1.0, 4, trainer=1)}
    assert scales_of(behind, None, CutRule(cut_after=2)) == {A: 0.0}


def test_a_pseudo_gradient_is_of_all_steps_since_its_fragment_was_averaged() -> None:
    of_stage = joins(40.0, 1.0, 2.0, 1.0)
    of_stage[A] = replace(of_stage[A], earlier=(StepsTrained(12, 24),))
    assert scales_of(of_stage, 10.0) == {}, "it is of 16 steps, not of 4"
    quorum = first_quorum(0, of_stage, {A: 0, B: 1, C: 2, D: 3}, 0, 10.0)
    assert [quorum.weights[peer] for peer in quorum.members] == [28, 4, 4, 4]


def test_what_is_beyond_the_bound_is_clipped_to_it() -> None:
    scales = scales_of(joins(40.0, 1.0, 2.0, 1.0), 10.0)
    assert scales == {A: 0.5}  # the upper median is 2, the bound 20
    assert scales_of(joins(20.0, 1.0, 2.0, 1.0), 10.0) == {}
    assert scales_of(joins(40.0, 1.0, 2.0, 1.0), 2.0) == {A: 0.1}
    assert scales_of(joins(40.0, 1.0, 2.0, 1.0), None) == {}


def test_one_that_is_not_finite_is_no_measure_for_the_others() -> None:
    assert scales_of(joins(math.inf, math.nan, 1.0, 1.0, 100.0), 10.0) == {A: 0.0, B: 0.0, PeerId("e"): 0.1}
    assert scales_of(joins(math.inf, 1.0, 100.0), 10.0) == {A: 0.0}


def test_without_a_majority_nothing_is_clipped() -> None:
    assert scales_of(joins(1000.0), 10.0) == {}
    assert scales_of(joins(1000.0, 1.0), 10.0) == {}
    assert scales_of(joins(1000.0, 1000.0, 1.0, 1.0), 10.0) == {}
    assert scales_of(joins(1000.0, 1000.0, 1.0, 1.0, 1.0), 10.0) == {A: 0.01, B: 0.01}


def test_where_most_have_not_moved_nothing_is_clipped() -> None:
    assert scales_of(joins(5.0, 0.0, 0.0), 10.0) == {}


def test_who_has_trained_nothing_or_only_skipped_is_neither_judged_nor_a_measure() -> None:
    idle = {C: join(0.0, 0), D: join(math.nan, 3, skipped=3, trainer=3)}
    assert scales_of(joins(1000.0, 1.0) | idle, 10.0) == {}


@given(
    steps=st.lists(st.integers(1, 90), min_size=3, max_size=8),
    exponent=st.floats(0.5, 1.0),
    unit=st.floats(1e-6, 1e6),
)
def test_honest_members_with_unequal_numbers_of_steps_are_not_clipped(
    steps: list[int], exponent: float, unit: float
) -> None:
    # A walk in all directions (0.5) to one in a single direction (1.0).
    found = {
        PeerId(f"p{index}"): join(unit * count**exponent, count, trainer=index) for index, count in enumerate(steps)
    }
    assert scales_of(found, 10.0) == {}


def test_clipped_members_keep_their_weight_and_uncounted_ones_lose_it() -> None:
    quorum = first_quorum(0, joins(math.nan, 50.0, 1.0, 1.0), {}, 0, 10.0)
    assert dict(quorum.weights) == {A: 0, B: 4, C: 4, D: 4}
    assert quorum.member_scales == (0.0, 0.2, 1.0, 1.0)
    quorum.next_epoch(frozenset({D}))
    assert quorum.member_scales == (0.0, 0.2, 1.0)
    quorum.next_epoch(frozenset({A, B}))
    assert quorum.member_scales == ()
    assert first_quorum(0, joins(1.0, 1.0, 1.0), {}, 0, 10.0).member_scales == ()


def recorded(quorum: StageQuorum, found: dict[PeerId, Join], other: StageQuorum | None = None) -> Record:
    quorums = [each.final() for each in (quorum, other) if each is not None]
    return build_record(
        run_id="run",
        previous=Tip(0, "D0", None),
        ballot=BALLOT,
        quorums=quorums,
        joins=found,
        recorded=(),
        generations={},
        restored={},
    )


def test_the_record_says_what_was_scaled_and_that_its_steps_are_lost_to_the_stage() -> None:
    found = joins(math.nan, 50.0, 1.0, 1.0)
    # Another stage holds the same steps, on replicas whose contributions count.
    twins = {PeerId(f"t{peer}"): join(1.0, trainer=index, stage=1) for index, peer in enumerate(found)}
    first, second = (first_quorum(stage, found | twins, {}, 0, 10.0) for stage in (0, 1))
    for quorum in (first, second):
        for peer in quorum.members:
            assert quorum.note(peer, 0, BYTES) is None
    record = recorded(first, found | twins, second)
    assert record.stages[0].scales == (0.0, 0.2, 1.0, 1.0)
    assert [stage.steps_lost for stage in record.stages] == [4, 0]
    # Trained they are: the other stage has them.
    assert sum(map(len, record.samples)) == 16
    assert suspects(record) == [
        Suspect(0, A, Suspicion.NOT_FINITE, 0.0, True),
        Suspect(0, B, Suspicion.CLIPPED, 0.2, True),
    ]


def test_who_differed_is_named_whether_it_recovers_or_is_left_out() -> None:
    found = joins(1.0, 1.0, 1.0)
    quorum = first_quorum(0, found, {}, 0, 10.0)
    for epoch, wrong in ((0, A), (1, B)):
        left_out = [quorum.note(peer, epoch, OTHER if peer == wrong else BYTES) for peer in (A, B, C)][-1]
        assert left_out == (frozenset() if epoch == 0 else frozenset({B}))
        quorum.next_epoch(left_out)
    for peer in (A, C):
        assert quorum.note(peer, 2, BYTES) is None
    record = recorded(quorum, found)
    assert record.stages[0].differed == (A, B)
    assert suspects(record) == [
        Suspect(0, A, Suspicion.DIFFERED, 1.0, True),
        Suspect(0, B, Suspicion.DIFFERED, 1.0, False),
    ]
