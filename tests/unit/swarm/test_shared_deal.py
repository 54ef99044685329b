"""The lease table where shares follow speed, rule by rule; whole rounds are in `test_shares`."""

from __future__ import annotations

import pytest
from tests.unit.swarm.lease_by_hand import batch, denied, granted, settled, table

from shoal.errors import RemoteProtocolError
from shoal.swarm.lease import LeaseTable
from shoal.wire.messages.base import SampleRange, StepRange


def shared(num_samples: int = 100, batch_samples: int = 4) -> LeaseTable:
    return table(num_samples, batch_samples, deterministic=False)


def test_a_faster_trainer_gets_larger_batches_from_the_first_step_on_if_that_is_known() -> None:
    leases = shared()
    leases.plan_round(1, 2, StepRange(0, 9), (30.0, 10.0))
    assert granted(leases.lease(0, 1, 1, 0)).batch == batch(0, 6)
    assert granted(leases.lease(1, 1, 1, 0)).batch == batch(6, 8)


def test_what_came_back_is_joined_and_cut_as_the_next_batches_want_it() -> None:
    leases = shared()
    leases.plan_round(1, 2, StepRange(0, 9))
    first, second = (granted(leases.lease(slot, 1, 1, 0)) for slot in (0, 1))
    leases.record(1, (SampleRange(0, 2, 3), SampleRange(0, 6, 8)))
    assert (first.batch, second.batch) == (batch(0, 4), batch(4, 8))
    leases.plan_round(2, 2, StepRange(0, 9), (30.0, 10.0))
    assert granted(leases.lease(0, 1, 2, 0)).batch.samples == (
        SampleRange(0, 0, 2),
        SampleRange(0, 3, 6),
        SampleRange(0, 8, 9),
    )
    assert granted(leases.lease(1, 1, 2, 0)).batch == batch(9, 11)


def test_a_step_that_was_given_back_is_given_again() -> None:
    leases = shared()
    leases.plan_round(1, 2, StepRange(0, 9))
    first = granted(leases.lease(0, 1, 1, 0))
    assert leases.give_back(first.lease)
    assert granted(leases.lease(0, 1, 1, 0)).batch == first.batch


def test_what_is_kept_for_a_step_that_is_left_out_goes_to_others() -> None:
    leases = shared()
    leases.plan_round(1, 2, StepRange(0, 9))
    assert granted(leases.lease(0, 1, 1, 0)).batch == batch(0, 4)
    assert leases.upcoming(9) == (batch(4, 8), batch(8, 12))
    assert granted(leases.lease(0, 2, 1, 2)).batch == batch(12, 16)
    assert leases.upcoming(9)[1].samples[0] == SampleRange(0, 8, 12), "for step 3"


@pytest.mark.parametrize(
    "strange",
    [(), (SampleRange(0, 3, 5),), (SampleRange(0, 90, 101),), (SampleRange(0, 8, 9), SampleRange(0, 8, 9))],
)
def test_a_claim_to_what_is_not_free_ends_a_resumed_round(strange: tuple[SampleRange, ...]) -> None:
    leases = shared()
    leases.record(1, (SampleRange(0, 0, 4),))
    leases.resume_round(2, 2, StepRange(0, 9), complete=True)
    assert leases.resume(0, 1, (SampleRange(0, 10, 17),), {}, done=False) is not None
    assert leases.resume(0, 1, (SampleRange(0, 5, 6),), {}, done=True) is not None
    assert leases.resume(1, 1, (SampleRange(0, 16, 18),), {}, done=False) is None
    leases = shared()
    leases.record(1, (SampleRange(0, 0, 4),))
    leases.resume_round(2, 2, StepRange(0, 9), complete=True)
    assert leases.resume(1, 1, strange, {}, done=False) is None
    assert "ends here" in denied(leases.lease(1, 1, 2, 1))


def test_a_table_that_begins_anew_deals_around_what_trainers_have() -> None:
    leases = shared()
    leases.record(1, (SampleRange(0, 0, 4),))
    leases.resume_round(2, 2, StepRange(0, 9), (30.0, 10.0), complete=True)
    leases.resume(0, 1, (SampleRange(0, 6, 8),), {}, done=True)
    leases.resume(1, 1, (SampleRange(0, 9, 11),), {}, done=False)
    assert granted(leases.lease(0, 1, 2, 3)).batch.samples == (
        SampleRange(0, 4, 6),
        SampleRange(0, 8, 9),
        SampleRange(0, 11, 14),
    )
    assert leases.release_trainer(1, 1, settled(round=2)).leases != ()
    assert granted(leases.lease(1, 2, 2, 3)).batch == batch(9, 11)


def test_the_last_batch_of_a_pass_is_short_also_where_sizes_differ() -> None:
    leases = shared(num_samples=20)
    leases.plan_round(1, 2, StepRange(0, 9), (30.0, 10.0))
    got = [granted(leases.lease(slot, 1, 1, step, float(step))).batch for step in (0, 1, 2) for slot in (0, 1)]
    assert got[4] == batch(16, 20)
    assert got[5] == batch(0, got[5].num_samples, pass_number=1)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, -1.0), (1.0, float("nan")), (1.0, float("inf")), (1.0, 1.0, 1.0)])
def test_speeds_that_make_no_sense_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="speeds"):
        shared().plan_round(1, 2, StepRange(0, 1), speeds)
