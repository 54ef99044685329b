"""With which record a client that has resumed a run begins again, and how long it keeps what the checkpoint has."""

from __future__ import annotations

import pytest
from tests.unit.swarm.test_round_coordinator_resumes import SIGNED, TIP

from shoal.ids import PeerId
from shoal.swarm.resumption import is_superseded, still_resumes

A, B = PeerId("a"), PeerId("b")


def test_another_start_begins_with_the_checkpoint_until_a_round_is_begun_on_a_later_record() -> None:
    assert still_resumes(SIGNED, TIP.hash) == SIGNED
    assert still_resumes(SIGNED, "later") is None
    assert still_resumes(None, TIP.hash) is None


@pytest.mark.parametrize(
    ("standing_round", "holders", "leaving", "superseded"),
    [
        (5, {A: 0}, (), True),
        (4, {A: 0}, (), False),
        (5, {A: 1}, (), False),
        (5, {}, (), False),
        (5, {A: 0}, (A,), False),
        (5, {A: 0, B: 0}, (A,), True),
    ],
)
def test_a_stage_is_kept_until_a_server_that_stays_holds_a_later_record_of_it(
    standing_round: int, holders: dict[PeerId, int], leaving: tuple[PeerId, ...], superseded: bool
) -> None:
    assert is_superseded(0, 4, standing_round, holders, leaving) is superseded
