"""How often the registry is read."""

from __future__ import annotations

from itertools import accumulate, pairwise

from shoal.control.read_pace import (
    FAST_READ_S,
    MAX_FAST_READ_S,
    MAX_SLOW_READ_S,
    SLOW_READ_S,
    ReadPace,
)
from shoal.control.registry import RENEW_S, TTL_S


def test_who_waits_reads_often_and_never_pauses_longer_than_a_share_of_the_wait() -> None:
    pace = ReadPace()
    pauses = [pace.pause_s(awaited=True, changed=False) for _ in range(200)]
    assert pauses[0] == FAST_READ_S
    assert all(before <= after for before, after in pairwise(pauses))
    for waited, pause in zip(accumulate(pauses, initial=0.0), pauses, strict=False):
        assert pause <= FAST_READ_S + 0.05 * waited + 1e-9
    assert pauses[-1] == MAX_FAST_READ_S
    # Who waits for something else begins anew.
    pace.pause_s(awaited=False, changed=True)
    assert pace.pause_s(awaited=True, changed=False) == FAST_READ_S


def test_a_swarm_in_which_nothing_changes_is_looked_at_seldom() -> None:
    pace = ReadPace()
    pauses = [pace.pause_s(awaited=False, changed=False) for _ in range(30)]
    assert pauses[0] == SLOW_READ_S
    assert all(before <= after for before, after in pairwise(pauses))
    assert pauses[-1] == MAX_SLOW_READ_S
    assert pace.pause_s(awaited=False, changed=True) == SLOW_READ_S


def test_a_renewed_record_is_read_before_its_old_copy_expires() -> None:
    assert MAX_SLOW_READ_S + RENEW_S < TTL_S


def test_what_expires_is_noticed_at_its_time() -> None:
    pace = ReadPace()
    assert pace.pause_s(awaited=False, changed=False, expires_in_s=0.5) == 0.5
    assert pace.pause_s(awaited=False, changed=False, expires_in_s=-1.0) == 0.0
