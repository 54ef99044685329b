"""What the gaps between signs of life say about the next one."""

from __future__ import annotations

import random
import statistics

import pytest

from shoal.swarm.liveness import MIN_TICKS, WINDOW_TICKS, K, Rhythm

TICK_S, LEAST_S, MOST_S = 0.25, 2.0, 6.0


def rhythm(*gaps_s: float) -> Rhythm:
    made = Rhythm(TICK_S, LEAST_S, MOST_S)
    for gap_s in gaps_s:
        made.heard_after(gap_s)
    return made


def test_a_regular_peer_gets_the_usual_deadline_and_an_unknown_one_too() -> None:
    assert rhythm().deadline_s == LEAST_S
    assert rhythm(*[TICK_S] * 1000).deadline_s == LEAST_S
    assert rhythm(*[1.5] * int(MIN_TICKS * TICK_S / 1.5)).deadline_s == LEAST_S


def test_the_deadline_is_the_median_and_so_many_deviations() -> None:
    rng = random.Random(1)
    # Gaps of about the same length: that each counts for as long as it lasted changes little.
    gaps_s = [rng.uniform(1.4, 1.6) for _ in range(19)]
    median_s = statistics.median(gaps_s)
    deviation_s = max(TICK_S / 2, statistics.median(abs(gap_s - median_s) for gap_s in gaps_s))
    assert rhythm(*gaps_s).deadline_s == pytest.approx(median_s + K * deviation_s, abs=0.05)
    # 1.0 and 2.0 in turn: 2.0 is what most of the time looks like, and half of it is not.
    assert rhythm(*[1.0, 1.8] * 10).deadline_s == pytest.approx(1.8 + K * TICK_S / 2)
    assert rhythm(*[0.5, 1.0, 1.5] * 10).deadline_s == pytest.approx(1.0 + K * 0.5)


def test_many_short_gaps_do_not_hide_the_long_ones_between_them() -> None:
    assert rhythm(*[TICK_S, TICK_S, TICK_S, TICK_S, 1.7] * 12).deadline_s == pytest.approx(1.7 + K * TICK_S / 2)


def test_no_peer_gets_more_than_the_longest_deadline() -> None:
    assert rhythm(*[0.5, 30.0, 7.0, 1.0] * 10).deadline_s == MOST_S


def test_what_was_long_ago_is_forgotten() -> None:
    known = rhythm(*[1.9] * 100)
    assert known.deadline_s > 2.5
    for _ in range(WINDOW_TICKS):
        known.heard_after(TICK_S)
    assert known.deadline_s == LEAST_S
