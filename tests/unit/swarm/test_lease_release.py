"""What becomes of the leases of a trainer that is gone, rule by rule."""

from __future__ import annotations

import pytest
from tests.unit.swarm.lease_by_hand import PATH, A, B, batch, denied, granted, key, settled, table
from tests.windows import leased

from shoal.ids import StepKey
from shoal.wire.messages.base import SampleRange, StepRange


def test_a_dead_trainers_lease_moves_only_when_it_is_released() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.note(held.lease, key(0, 0), PATH)
    assert "handed out" in denied(leases.lease(0, 2, 1, 0))
    leases.release_trainer(0, 1, settled())
    assert granted(leases.lease(0, 2, 1, 0)).batch == held.batch


def test_a_dead_trainers_committed_step_is_not_handed_out_again() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 2))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.note(held.lease, key(0, 0, attempt=1), PATH)
    leases.release_trainer(0, 1, settled(key(0, 0, attempt=1)))
    # The new trainer counts its steps anew and still gets the batch that is missing.
    assert granted(leases.lease(0, 2, 1, 0)).batch == batch(2, 4)
    leases.record(1, (SampleRange(0, 0, 4),))
    assert leases.free == ()


def test_a_lease_whose_note_was_lost_waits_for_the_record() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.release_trainer(0, 1, settled(key(0, 0)))
    assert leased(leases) == {held.lease: batch(0, 2)}
    leases.record(1, ())
    assert leases.free == (batch(0, 2),)


def test_a_lease_without_a_note_is_free_only_if_everybody_has_answered() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.release_trainer(0, 1, settled(complete=False))
    assert held.lease in leased(leases)
    leases.release_trainer(0, 1, settled(complete=True))
    assert leases.free == (held.batch,)


def test_a_lease_is_free_only_if_a_replica_of_each_attempts_path_denies_it() -> None:
    """B alone may have committed the second attempt, and is cut off."""
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.note(held.lease, key(0, 0), PATH)
    leases.note(held.lease, key(0, 0, attempt=1), (B,))
    leases.release_trainer(0, 1, settled())
    assert held.lease in leased(leases)
    leases.release_trainer(0, 1, settled(since={A: key(0, 0), B: key(0, 0, attempt=1)}, complete=False))
    assert leases.free == (held.batch,)


@pytest.mark.parametrize(
    ("since", "is_free"),
    [
        (key(0, 0), True),
        (key(0, 1), True),
        (key(0, 1, attempt=1), False),
        (key(0, 0, generation=2), False),
        (key(1, 0), False),
    ],
)
def test_a_replica_denies_only_what_was_opened_in_its_generation(since: StepKey, is_free: bool) -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 2))
    held = granted(leases.lease(0, 1, 1, 1))
    leases.note(held.lease, key(0, 1), PATH)
    leases.release_trainer(0, 1, settled(since={A: since}))
    assert (held.batch in leases.free) == is_free


def test_what_is_known_of_another_round_frees_nothing() -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 1))
    held = granted(leases.lease(0, 1, 1, 0))
    leases.note(held.lease, key(0, 0), PATH)
    leases.release_trainer(0, 1, settled(round=2))
    assert held.lease in leased(leases)


@pytest.mark.parametrize("how", ["acknowledged", "given back"])
def test_a_lease_that_its_trainer_has_left_to_the_record_stays_for_it_whoever_dies(how: str) -> None:
    leases = table()
    leases.plan_round(1, 1, StepRange(0, 2))
    left, next_one = (granted(leases.lease(0, 1, 1, step)) for step in (0, 1))
    leases.note(left.lease, key(0, 0), PATH)
    if how == "acknowledged":
        leases.acknowledge(left.lease, committed=False)
    else:
        leases.give_back(left.lease)
    leases.note(next_one.lease, key(0, 1), PATH)
    leases.release_trainer(0, 1, settled())
    assert list(leased(leases)) == [left.lease]
    leases.record(1, ())
    assert leases.free == (left.batch, next_one.batch)


def test_a_release_says_where_the_slot_goes_on() -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 4))
    for step in (0, 1, 2):
        held = granted(leases.lease(0, 1, 1, step))
        leases.note(held.lease, key(0, step), PATH if step == 2 else (B,))
    leases.lease(1, 1, 1, 3)
    released = leases.release_trainer(0, 1, settled(key(0, 0)))
    assert (len(released.leases), released.next_step, released.is_known) == (3, 2, True)


@pytest.mark.parametrize("is_forgone", [True, False])
def test_a_table_that_has_begun_anew_says_whether_it_knows_all_leases(is_forgone: bool) -> None:
    leases = table()
    leases.resume_round(1, 1, StepRange(0, 4), complete=True)
    leases.resume(0, 1, (SampleRange(0, 2, 4),), {key(0, 1): (B,)}, done=False)
    if is_forgone:
        leases.forgo()
    released = leases.release_trainer(0, 1, settled())
    assert (released.next_step, released.is_known) == (2, not is_forgone)


def test_a_stale_generation_gets_no_lease() -> None:
    leases = table()
    leases.plan_round(1, 2, StepRange(0, 4))
    leases.release_trainer(0, 3, settled())
    assert "stale" in denied(leases.lease(0, 3, 1, 0))
    granted(leases.lease(0, 4, 1, 0))
    granted(leases.lease(1, 1, 1, 0))


def test_resumed_leases_are_settled_like_others() -> None:
    leases = table()
    leases.resume_round(1, 1, StepRange(0, 3), complete=True)
    leases.resume(0, 1, (SampleRange(0, 0, 2),), {key(0, 0): PATH}, done=False)
    leases.resume(0, 1, (SampleRange(0, 2, 4),), {key(0, 1): PATH}, done=False)
    leases.release_trainer(0, 1, settled(key(0, 0)))
    assert sorted(leased(leases).values()) == [batch(0, 2)]
    assert granted(leases.lease(0, 2, 1, 1)).batch == batch(2, 4)
