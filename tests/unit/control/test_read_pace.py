"""How often the registry is read."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from shoal.control.read_pace import (
    ALL_EVERY_S,
    FAST_READ_S,
    MAX_FAST_READ_S,
    MAX_SLOW_READ_S,
    SEARCH_AHEAD_S,
    SEARCH_FOR_S,
    SLOW_READ_S,
    ReadPace,
)
from shoal.control.record_holders import REPLICAS, SOME
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


def _asked(pace: ReadPace, seconds: float, *, awaited: bool = False, expires_in_s: float = 25.0) -> list[int | None]:
    """How many holders each read of so long a time asks."""
    found: list[int | None] = []
    while seconds > 0:
        seconds -= pace.pause_s(awaited=awaited, changed=False, expires_in_s=expires_in_s)
        found.append(pace.holders)
    return found


@pytest.mark.parametrize("awaited", [False, True])
def test_as_long_as_nothing_happens_a_few_are_asked_and_now_and_then_all_holders(awaited: bool) -> None:
    pace = ReadPace()
    assert pace.holders is None
    assert set(_asked(pace, SEARCH_FOR_S - MAX_FAST_READ_S, awaited=awaited)) == {None}
    _asked(pace, 100.0, awaited=awaited)
    numbers = _asked(pace, 30 * ALL_EVERY_S, awaited=awaited)
    assert set(numbers) == {SOME, REPLICAS}
    assert 20 <= numbers.count(REPLICAS) <= 30
    pace.pause_s(awaited=awaited, changed=True)
    assert pace.holders is None


def test_somebody_who_begins_to_wait_has_everybody_searched() -> None:
    pace = ReadPace()
    _asked(pace, 100.0)
    pace.pause_s(awaited=True, changed=False)
    assert pace.holders is None


def test_what_seems_to_expire_is_searched_everywhere_before_it_does_and_when_it_does() -> None:
    pace = ReadPace()
    _asked(pace, 100.0)
    left_s, pauses = 10.0, list[float]()
    while left_s > 0:
        pauses.append(pace.pause_s(awaited=False, changed=False, expires_in_s=left_s))
        left_s -= pauses[-1]
        assert pace.holders is None
    assert pauses == [10.0 - SEARCH_AHEAD_S, SEARCH_AHEAD_S]
    pace.pause_s(awaited=False, changed=False, expires_in_s=25.0)
    assert pace.holders == SOME


def test_what_is_renewed_in_time_is_not_searched() -> None:
    assert MAX_SLOW_READ_S + SEARCH_AHEAD_S < TTL_S - RENEW_S
