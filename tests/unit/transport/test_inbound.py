"""What may lie unread at an endpoint is bounded, and nobody is left unread for ever."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.host import HealthConfig
from shoal.transport import limits
from shoal.transport.inbound import Unread

GIB = 1 << 30


@pytest.mark.parametrize(("free_gib", "most_gib"), [(0, 1), (2, 1), (64, 16)])
def test_what_has_come_of_frames_that_are_not_whole_may_take_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, most_gib: int
) -> None:
    monkeypatch.setattr(limits, "free_memory_bytes", lambda: free_gib * GIB)
    assert limits.limits_for(HealthConfig(), "server").max_unfinished_total_bytes == most_gib * GIB


def test_a_connection_stops_at_its_own_limit_and_goes_on_at_half_of_it() -> None:
    unread = Unread[str](100, 1000, 10)
    assert not unread.received("a", 60)
    assert unread.received("a", 60)
    assert not unread.received("b", 60)
    assert unread.taken("b", 60) == []
    assert unread.taken("a", 60) == []
    assert unread.taken("a", 60) == ["a"]


def test_all_together_stop_at_the_limit_of_the_endpoint() -> None:
    unread = Unread[int](100, 300, 10)
    stopped = [number for number in range(5) if unread.received(number, 80)]
    assert stopped == [3, 4]
    assert [unread.taken(number, 80) for number in range(2)] == [[], []]
    assert unread.taken(2, 80) == []
    assert unread.taken(3, 80) == [3]


def test_who_has_nothing_unread_is_read_although_others_fill_the_endpoint() -> None:
    unread = Unread[str](1000, 100, 10)
    assert unread.received("big", 500)
    assert unread.received("small", 11)
    assert unread.taken("small", 11) == ["small"]


def test_who_holds_no_more_than_its_share_is_read_however_many_fill_the_endpoint_together() -> None:
    unread = Unread[str](1000, 100, 10)
    flood = [f"flooder {number}" for number in range(50)]
    stopped = [each for each in flood for _ in range(10) if unread.received(each, 3)]
    assert len(stopped) > 100, "each comes again and again and is not read any more"
    assert not any(unread.received("member", 2) for _ in range(5))
    assert unread.received("member", 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=200), st.integers(1, 5))
def test_the_bound_holds_and_in_the_end_everybody_is_read(frames: list[tuple[int, int]], per_take: int) -> None:
    unread = Unread[int](60, 100, 10)
    queue: deque[tuple[int, int]] = deque()
    stopped: set[int] = set()
    held = {key: [size for owner, size in frames if owner == key] for key in range(4)}
    while any(held.values()) or queue:
        for key, sizes in held.items():
            if sizes and key not in stopped:
                size = sizes.pop(0)
                queue.append((key, size))
                if unread.received(key, size):
                    stopped.add(key)
        assert sum(size for _, size in queue) <= 100 + 4 * (50 + 10)
        for _ in range(per_take):
            if queue:
                stopped -= set(unread.taken(*queue.popleft()))
    assert not stopped
    assert not unread.received(0, 60), "what was taken is not counted any more"
