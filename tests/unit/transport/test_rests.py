"""Those whose messages take long are read for half of the loop's time in all, and others as if they were alone."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from shoal.transport.rests import Pace, Rests

TOOK_S = 0.005
LASTS_S = 600.0


def read_for_long(num_flooding: int, member_every_s: float) -> tuple[Counter[str], float]:
    """Let some send without end, and a member now and then; return how long each was read, and the member's rests."""
    rests = Rests()
    paces = {f"flooder {number}": Pace(rests, 0.0) for number in range(num_flooding)} | {"member": Pace(rests, 0.0)}
    ready = [(member_every_s if name == "member" else 0.0, name) for name in paces]
    heapq.heapify(ready)
    resting: set[str] = set()
    read_s: Counter[str] = Counter()
    now_s = member_rested_s = 0.0
    while ready and now_s < LASTS_S:
        at_s, name = heapq.heappop(ready)
        now_s = max(now_s, at_s) + TOOK_S
        if name in resting:
            paces[name].end()
            resting.discard(name)
        read_s[name] += TOOK_S
        rest_s = paces[name].begin(TOOK_S, now_s)
        if rest_s:
            resting.add(name)
        if name == "member":
            member_rested_s += rest_s
        heapq.heappush(ready, (now_s + (member_every_s if name == "member" else rest_s), name))
    return read_s, member_rested_s


@pytest.mark.parametrize("num_flooding", [1, 2, 10, 200])
def test_however_many_send_small_messages_without_end_half_of_the_time_is_left(num_flooding: int) -> None:
    read_s, _ = read_for_long(num_flooding, member_every_s=1.0)
    flooders = {name: taken for name, taken in read_s.items() if name != "member"}
    assert 0.25 * LASTS_S < sum(flooders.values()) < 0.55 * LASTS_S
    assert max(flooders.values()) <= 2 * min(flooders.values()) + 2 * TOOK_S, "and all have the same part of it"


def test_a_peer_that_sends_little_does_not_rest_for_what_others_do() -> None:
    read_s, rested_s = read_for_long(20, member_every_s=1.0)
    assert read_s["member"] > 0.9 * LASTS_S * TOOK_S
    assert rested_s == 0.0


def test_one_that_comes_anew_has_no_credit() -> None:
    assert Pace(Rests(), 100.0).begin(TOOK_S, 100.0) == pytest.approx(TOOK_S)


def test_credit_has_a_bound() -> None:
    pace = Pace(Rests(), 0.0)
    assert pace.begin(0.05, 1e6) == 0.0
    assert pace.begin(0.15, 1e6) == pytest.approx(0.1)
