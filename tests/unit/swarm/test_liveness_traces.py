"""Five minutes of virtual time on good and bad links: nobody who runs is suspected, who freezes is noticed in
time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from shoal.swarm.liveness import LEAST_HEARTBEATS, Activity, Liveness
from shoal_lab.faults.link import LinkConditions
from shoal_lab.faults.link_model import LinkModel

BEAT_S, DEADLINE_S, MAX_DEADLINE_S = 0.25, 2.0, 6.0
SELDOM_S = DEADLINE_S / LEAST_HEARTBEATS
"""Between the ticks of one that nobody waits for."""
END_S = 300.0
SEEDS = range(8)
PROMISED_S = 3.5
"""From the fault to its discovery on a link that is regular, with the ticks of both sides."""

Trace = Callable[[random.Random], list[float]]
"""Gives the times at which something of a peer arrives."""


def beats(rng: random.Random, beat_s: float = BEAT_S) -> Iterator[float]:
    """The ticks of a peer's event loop, which is never quite in time."""
    at_s = rng.uniform(0.0, beat_s)
    while at_s < END_S:
        yield at_s
        at_s += beat_s + rng.uniform(0.0, 0.02)


def steady(rng: random.Random) -> list[float]:
    return list(beats(rng))


def seldom(rng: random.Random) -> list[float]:
    """A peer that says it is there as seldom as it may."""
    return list(beats(rng, SELDOM_S))


def jittery(rng: random.Random) -> list[float]:
    """A radio link: late at random, and each twentieth packet lost."""
    model = LinkModel(LinkConditions(delay_s=0.05, jitter_s=0.3, loss=0.05), rng.random())
    return [parcel.arrives_s for at_s in beats(rng) for parcel in model.take(at_s, b"x" * 40)]


def bursty(rng: random.Random) -> list[float]:
    """10 Mbit/s and 200 ms with losses, filled by a tensor for seconds, with heartbeats before and behind it."""
    conditions = LinkConditions(rate_bytes_per_s=1.25e6, delay_s=0.1, jitter_s=0.04, loss=0.002)
    model, arrivals, left = LinkModel(conditions, rng.random()), list[float](), 0
    ticks, tensors = list(beats(rng)), [rng.uniform(0, 290) for _ in range(12)]
    for step in range(int(END_S / 0.02)):
        now_s = step * 0.02
        left += 4_000_000 * sum(now_s <= at_s < now_s + 0.02 for at_s in tensors)
        size = min(left, int(model.room_bytes(now_s)))
        left -= size
        while ticks and ticks[0] < now_s + 0.02:
            ticks.pop(0)
            size = size or 40  # a heartbeat where nothing else was sent
        if size:
            arrivals += {parcel.arrives_s for parcel in model.take(now_s, bytes(size))}
    return arrivals


def flapping(rng: random.Random) -> list[float]:
    """A link that is out for half of each second: TCP sends again after 0.2 s, then twice as long, until it is in."""
    offset_s, arrivals, free_s = rng.random(), list[float](), 0.0
    for at_s in beats(rng):
        sent_s, pause_s = max(at_s, free_s), 0.2
        while (sent_s + offset_s) % 1.0 < 0.5:
            sent_s, pause_s = sent_s + pause_s, 2 * pause_s
        free_s = sent_s
        arrivals.append(sent_s + 0.001)
    return arrivals


def starved(rng: random.Random) -> list[float]:
    """A peer whose event loop gets its turn later and later, at the end rarer than the usual deadline."""
    arrivals, at_s = list[float](), 0.0
    while at_s < END_S:
        arrivals.append(at_s)
        at_s += rng.uniform(BEAT_S, min(2.8, 1.5 + at_s / 30))
    return arrivals


def in_bursts(rng: random.Random) -> list[float]:
    """All that a peer says comes in bursts, since its link sleeps in between; longer and longer."""
    arrivals, at_s = list[float](), 0.0
    while at_s < END_S:
        arrivals += [at_s + 0.3 * i for i in range(4)]
        at_s += 0.9 + rng.uniform(0.9, 1.0) * min(2.3, 1.5 + at_s / 60)
    return arrivals


def given_up_at_s(
    arrivals: list[float], rng: random.Random, *, is_blocked_at_times: bool, beat_s: float = BEAT_S
) -> float:
    """Return when an observer gives the peer up; infinite if it does not. It may be blocked for seconds itself."""
    watch = Liveness[str](heartbeat_s=beat_s, deadline_s=DEADLINE_S, max_deadline_s=MAX_DEADLINE_S, now_s=0.0)
    arrivals, now_s, read = sorted(arrivals), 0.0, 0
    while now_s < END_S:
        now_s += beat_s + rng.uniform(0.0, 0.02)
        if is_blocked_at_times and rng.random() < 0.005:
            now_s += rng.uniform(0.5, 5.0)
        heard = read < len(arrivals) and arrivals[read] <= now_s
        while read < len(arrivals) and arrivals[read] <= now_s:
            read += 1
        if watch.tick(now_s, {"a": Activity(heard, True, peer="peer")}).dead:
            return now_s
    return math.inf


REGULAR = (steady, seldom, jittery, bursty, flapping)
IRREGULAR = (starved, in_bursts)


@pytest.mark.parametrize("is_blocked_at_times", [False, True])
@pytest.mark.parametrize(
    ("trace", "beat_s"), [*((trace, BEAT_S) for trace in (*REGULAR, *IRREGULAR)), (steady, SELDOM_S)]
)
def test_who_is_alive_is_not_suspected_in_five_minutes(trace: Trace, beat_s: float, is_blocked_at_times: bool) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        given_up_s = given_up_at_s(trace(rng), rng, is_blocked_at_times=is_blocked_at_times, beat_s=beat_s)
        assert given_up_s == math.inf, f"seed {seed}"


@pytest.mark.parametrize(
    ("trace", "beat_s"), [*((trace, BEAT_S) for trace in (*REGULAR, *IRREGULAR)), (steady, SELDOM_S)]
)
def test_who_freezes_or_is_cut_off_is_noticed_in_time(trace: Trace, beat_s: float) -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        last_s = rng.uniform(60.0, 200.0)
        heard = [at_s for at_s in trace(rng) if at_s < last_s]
        noticed_s = given_up_at_s(heard, rng, is_blocked_at_times=False, beat_s=beat_s) - max(heard)
        limit_s = MAX_DEADLINE_S + 2 * beat_s if trace in IRREGULAR else PROMISED_S
        assert DEADLINE_S <= noticed_s <= limit_s, f"seed {seed}"
