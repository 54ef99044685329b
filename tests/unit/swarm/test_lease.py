"""The lease table, rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.swarm.lease_by_hand import PATH, batch, denied, granted, key, table
from tests.windows import leased

from shoal.errors import RemoteProtocolError
from shoal.ids import StepKey
from shoal.swarm.lease import Grant, Later
from shoal.swarm.sample_ranges import merge
from shoal.swarm.takeover import Settled
from shoal.wire.messages.base import SampleRange, StepRange


@pytest.mark.parametrize("order", [[(0, 0), (1, 0), (0, 1), (1, 1)], [(1, 0), (1, 1), (0, 0), (0, 1)]])
def test_a_deterministic_batch_depends_on_slot_and_step_not_on_who_asks_first(order: list[tuple[int, int]]) -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 2))
    got = {asked: granted(leases.lease(asked[0], 1, 1, asked[1])).batch for asked in order}
    assert got == {(0, 0): batch(0, 2), (1, 0): batch(2, 4), (0, 1): batch(4, 6), (1, 1): batch(6, 8)}


def test_otherwise_a_trainers_next_batch_is_kept_for_it_when_it_is_given_one() -> None:
    leases = table(deterministic=False)
    leases.plan_round(1, 2, StepRange(0, 3))
    assert leases.upcoming(9) == (batch(0, 2), batch(2, 4))
    assert granted(leases.lease(1, 1, 1, 0)).batch == batch(2, 4)
    assert leases.upcoming(9) == (batch(0, 2), batch(4, 6))
    assert granted(leases.lease(0, 1, 1, 0)).batch == batch(0, 2)
    assert leases.upcoming(9) == (batch(6, 8), batch(4, 6))


@pytest.mark.parametrize("deterministic", [True, False])
def test_in_a_pause_nothing_is_leased_and_what_is_leased_goes_on(deterministic: bool) -> None:
    leases = table(deterministic=deterministic)
    leases.plan_round(1, 2, StepRange(0, 2))
    first = granted(leases.lease(0, 1, 1, 0))
    leases.pause()
    assert leases.lease(1, 1, 1, 0) == Later()
    assert "outside the plan" in denied(leases.lease(1, 1, 1, 9)), "that will never be leased"
    leases.note(first.lease, key(0, 0), PATH)
    leases.acknowledge(first.lease, committed=True)
    assert leases.lease(0, 1, 1, 1) == Later()
    leases.go_on()
    assert granted(leases.lease(1, 1, 1, 0)).batch == batch(2, 4)
    assert granted(leases.lease(0, 1, 1, 1)).batch == batch(4, 6)


def test_a_pause_outlasts_the_round_that_is_planned() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    leases.pause()
    leases.record(1, ())
    leases.plan_round(2, 1, StepRange(1, 2))
    assert leases.lease(0, 1, 2, 1) == Later()


def test_the_next_round_goes_on_where_the_last_one_ended() -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 1))
    for slot in (0, 1):
        leases.lease(slot, 1, 1, 0)
    leases.record(1, (SampleRange(0, 0, 4),))
    leases.plan_round(2, 1, StepRange(0, 1))
    assert granted(leases.lease(0, 1, 2, 0)).batch == batch(4, 6)


def test_what_the_record_does_not_contain_is_handed_out_first_in_the_next_round() -> None:
    leases = table()
    leases.plan_round(1, 3, StepRange(0, 1))
    grants = [granted(leases.lease(slot, 1, 1, 0)) for slot in (0, 1, 2)]
    leases.acknowledge(grants[0].lease, committed=True)
    leases.record(1, (SampleRange(0, 4, 6),))
    leases.plan_round(2, 3, StepRange(0, 1))
    got = [granted(leases.lease(slot, 1, 2, 0)).batch for slot in (0, 1, 2)]
    assert got == [batch(0, 2), batch(2, 4), batch(6, 8)]


def test_a_record_of_an_earlier_round_leaves_leases_of_this_round_alone() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    first = granted(leases.lease(0, 1, 1, 0))
    leases.plan_round(2, 1, StepRange(0, 1))
    second = granted(leases.lease(0, 1, 2, 0))
    assert leases.record(1, (SampleRange(0, 0, 2),)) == (first.lease,)
    assert list(leased(leases)) == [second.lease]


def test_a_batch_that_is_recorded_in_part_keeps_its_rest() -> None:
    leases = table(batch_samples=6)
    leases.plan_round(1, 1, StepRange(0, 1))
    leases.lease(0, 1, 1, 0)
    leases.record(1, (SampleRange(0, 2, 4),))
    leases.plan_round(2, 1, StepRange(0, 1))
    rest = granted(leases.lease(0, 1, 2, 0)).batch
    assert rest.samples == (SampleRange(0, 0, 2), SampleRange(0, 4, 6))
    assert rest.num_samples == 4


def test_records_seen_before_any_lease_are_not_handed_out_again() -> None:
    leases = table()
    leases.record(1, (SampleRange(0, 0, 7),))
    leases.plan_round(2, 2, StepRange(0, 1))
    assert granted(leases.lease(0, 1, 2, 0)).batch == batch(7, 8)
    assert granted(leases.lease(1, 1, 2, 0)).batch == batch(8, 10)


def test_the_last_batch_of_a_pass_is_short_and_the_next_pass_begins_after_it() -> None:
    leases = table(num_samples=5, batch_samples=2)
    leases.plan_round(1, 1, StepRange(0, 4))
    got = [granted(leases.lease(0, 1, 1, step)).batch for step in range(4)]
    assert got == [batch(0, 2), batch(2, 4), batch(4, 5), batch(0, 2, pass_number=1)]


def test_a_later_generation_fences_the_earlier_one() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 4))
    granted(leases.lease(0, 2, 1, 0))
    assert "stale" in denied(leases.lease(0, 1, 1, 1))


def test_an_unused_lease_that_is_given_back_is_handed_out_for_the_same_step_again() -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 1))
    first = granted(leases.lease(0, 1, 1, 0))
    assert leases.give_back(first.lease)
    assert granted(leases.lease(0, 1, 1, 0)).batch == first.batch


def test_a_lease_with_a_noted_attempt_cannot_be_given_back() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.note(held.lease, key(0, 0), PATH)
    assert not leases.give_back(held.lease)
    assert held.lease in leased(leases)


def test_steps_and_rounds_outside_the_plan_are_denied() -> None:
    leases = table()
    assert "not open" in denied(leases.lease(0, 1, 1, 0))
    leases.plan_round(1, 2, StepRange(0, 3))
    assert "outside the plan" in denied(leases.lease(0, 1, 1, 3))
    assert "outside the plan" in denied(leases.lease(2, 1, 1, 0))
    assert "not open" in denied(leases.lease(0, 1, 2, 0))


def test_the_same_plan_twice_changes_nothing_and_another_one_keeps_what_is_leased() -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 1))
    held = granted(leases.lease(1, 1, 1, 0))
    assert held.batch == batch(2, 4)
    leases.plan_round(1, 2, StepRange(0, 1))
    assert "handed out" in denied(leases.lease(1, 1, 1, 0))
    leases.plan_round(1, 1, StepRange(0, 2))
    assert [granted(leases.lease(0, 1, 1, step)).batch for step in (0, 1)] == [batch(0, 2), batch(4, 6)]


def test_upcoming_batches_are_those_that_are_handed_out_next() -> None:
    leases = table(num_samples=7)
    assert leases.upcoming(2) == (batch(0, 2), batch(2, 4))
    leases.plan_round(1, 2, StepRange(0, 2))
    upcoming = leases.upcoming(4)
    got = [granted(leases.lease(slot, 1, 1, step)).batch for step in (0, 1) for slot in (0, 1)]
    assert list(upcoming) == got
    assert leases.upcoming(1) == (batch(0, 2, pass_number=1),)


def test_steps_are_asked_for_by_their_numbers_in_the_run_and_a_lost_trainers_successor_goes_on_by_them() -> None:
    leases = table()
    leases.plan_round(3, 2, StepRange(6, 9))
    assert granted(leases.lease(0, 1, 3, 6)).batch == batch(0, 2)
    assert granted(leases.lease(0, 1, 3, 7)).batch == batch(4, 6)
    for number in (0, 5, 9):
        assert "outside the plan" in denied(leases.lease(0, 1, 3, number))
    nothing = Settled(3, frozenset(), frozenset({StepKey(0, 1, 7, 0)}), {}, complete=False)
    assert leases.release_trainer(0, 1, nothing).next_step == 8
    assert leases.release_trainer(1, 1, nothing).next_step == 6


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (100_000, 100_000)])
def test_a_plan_that_makes_no_sense_is_refused(sizes: tuple[int, int]) -> None:
    num_slots, num_steps = sizes
    with pytest.raises(RemoteProtocolError, match="cannot be planned"):
        table().plan_round(1, num_slots, StepRange(0, num_steps))


@pytest.mark.parametrize("strange", [SampleRange(0, 0, 21), SampleRange(-1, 0, 1), SampleRange(0, 4, 2)])
def test_a_record_with_samples_that_do_not_exist_is_refused(strange: SampleRange) -> None:
    with pytest.raises(RemoteProtocolError, match="names"):
        table().record(1, (strange,))


@given(
    num_samples=st.integers(1, 40),
    batch_samples=st.integers(1, 9),
    num_slots=st.integers(1, 3),
    deterministic=st.booleans(),
    data=st.data(),
)
def test_whatever_records_leave_out_every_sample_of_a_pass_is_recorded_exactly_once(
    num_samples: int, batch_samples: int, num_slots: int, deterministic: bool, data: st.DataObject
) -> None:
    leases = table(num_samples, batch_samples, deterministic=deterministic)
    recorded: list[SampleRange] = []
    for round_number in range(1, 40):
        leases.plan_round(round_number, num_slots, StepRange(0, 2))
        asked = [(slot, step) for slot in range(num_slots) for step in range(2)]
        grants = [
            granted(leases.lease(slot, 1, round_number, step)) for slot, step in data.draw(st.permutations(asked))
        ]
        keep = [grant for grant in grants if round_number > 5 or data.draw(st.booleans())]
        samples = tuple(item for grant in keep for item in grant.batch.samples)
        recorded += samples
        leases.record(round_number, samples)
        if leases.recorded and leases.recorded[0] == SampleRange(0, 0, num_samples):
            break
    assert sum(len(item) for item in recorded) == sum(len(item) for item in merge(recorded))
    assert merge(recorded)[0] == SampleRange(0, 0, num_samples)


@pytest.mark.parametrize("replan", ["never", "before the record", "after the record"])
@pytest.mark.parametrize("asked_first", [False, True])
def test_a_record_takes_out_batches_that_were_free_already(replan: str, asked_first: bool) -> None:
    leases = table(num_samples=8)
    leases.plan_round(1, 2, StepRange(0, 1))
    for slot in (0, 1):
        leases.lease(slot, 1, 1, 0)
    if replan == "before the record":
        leases.plan_round(2, 2, StepRange(0, 1))
    leases.record(1, ())
    if replan == "after the record":
        leases.plan_round(2, 2, StepRange(0, 1))
    if asked_first:
        # Numbers the first batch of the plan and gives it back.
        leases.give_back(granted(leases.lease(0, 1, leases.planned_round, 0)).lease)
    leases.record(1, (SampleRange(0, 0, 4),))
    leases.plan_round(3, 2, StepRange(0, 1))
    got = [granted(leases.lease(slot, 1, 3, 0)).batch for slot in (0, 1)]
    assert got == [batch(4, 6), batch(6, 8)]


def test_a_table_that_begins_in_the_middle_of_a_round_deals_the_batches_that_it_would_have_dealt() -> None:
    first, again = table(), table()
    for leases in (first, again):
        # Batches 1 and 2 of round 1 are in no record.
        leases.record(1, (SampleRange(0, 0, 2), SampleRange(0, 6, 8)))
    first.plan_round(2, 2, StepRange(0, 3))
    got = {(slot, step): granted(first.lease(slot, 1, 2, step)).batch for step in range(3) for slot in (0, 1)}
    again.resume_round(2, 2, StepRange(0, 3), complete=True)
    for slot, step in ((1, 0), (0, 0), (1, 1)):
        assert again.resume(slot, 1, got[slot, step].samples, {}, done=step == 0) is not None
    left = {(slot, step): granted(again.lease(slot, 1, 2, step)).batch for slot, step in ((0, 1), (0, 2), (1, 2))}
    assert left == {place: got[place] for place in left}


def test_in_a_resumed_round_nobody_gets_the_batch_of_another_step() -> None:
    leases = table()
    leases.resume_round(1, 1, StepRange(0, 3), complete=False)
    leases.resume(0, 1, (SampleRange(0, 2, 4),), {key(0, 1): PATH}, done=True)
    assert "handed out" in denied(leases.lease(0, 1, 1, 1))
    assert granted(leases.lease(0, 1, 1, 2)).batch == batch(4, 6)


@pytest.mark.parametrize("deterministic", [True, False])
def test_where_leases_are_unknown_nothing_more_is_leased_unless_steps_tell_them(deterministic: bool) -> None:
    for complete in (True, False):
        leases = table(deterministic=deterministic)
        leases.resume_round(1, 2, StepRange(0, 2), complete=complete)
        if complete:
            leases.forgo()
        answer = leases.lease(0, 2, 1, 1)
        assert isinstance(answer, Grant) == deterministic
        leases.record(1, ())
        leases.plan_round(2, 2, StepRange(0, 2))
        assert granted(leases.lease(1, 1, 2, 0)).batch.num_samples == 2


def test_a_held_batch_that_this_table_would_not_deal_ends_the_round() -> None:
    leases = table()
    leases.resume_round(1, 1, StepRange(0, 2), complete=True)
    assert leases.resume(0, 1, (SampleRange(0, 1, 3),), {}, done=False) is None
    assert "ends here" in denied(leases.lease(0, 1, 1, 1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_on_another_chain_only_what_its_records_name_is_used(deterministic: bool) -> None:
    leases = table(deterministic=deterministic)
    leases.plan_round(1, 1, StepRange(0, 1))
    leases.record(1, (SampleRange(0, 0, 6),))
    leases.plan_round(2, 1, StepRange(0, 1))
    out = granted(leases.lease(0, 1, 2, 0)).lease
    assert leases.record(1, (SampleRange(0, 0, 2),), "another chain") == (out,)
    assert leases.recorded == (SampleRange(0, 0, 2),)
    assert (leases.planned_round, leased(leases)) == (0, {})
    # Said again, as to a data server that has come back, it changes nothing.
    leases.plan_round(2, 1, StepRange(0, 1))
    assert granted(leases.lease(0, 1, 2, 0)).batch == batch(2, 4)
    assert leases.record(1, (SampleRange(0, 0, 2),), "another chain") == ()
    assert len(leased(leases)) == 1
