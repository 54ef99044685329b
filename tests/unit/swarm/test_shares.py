"""Sizes of steps that follow speed: their sums and bounds, and emulated rounds in which trainers end together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.windows import leased

from shoal.swarm.lease import Grant, LeaseTable
from shoal.swarm.sample_ranges import BatchStream
from shoal.swarm.shares import Speed, Standing, StepSizes, bounds, even_finish, known
from shoal.wire.messages.base import StepRange

MANY = 10**9


def test_a_speed_is_the_median_so_that_one_odd_step_does_not_count() -> None:
    speed = Speed()
    assert speed.samples_per_s == 0
    for duration_s in (1.0, 1.0, 30.0, 1.0):
        speed.measured(8, duration_s)
    assert speed.samples_per_s == 8
    for _ in range(3):
        speed.measured(8, 4.0)
    assert speed.samples_per_s == 2


def test_a_speed_that_is_known_before_is_believed_until_the_third_step() -> None:
    speed = Speed(10.0)
    for expected in (10.0, 25.0, 40.0):
        speed.measured(40, 1.0)
        assert speed.samples_per_s == expected


def test_what_makes_no_sense_is_not_measured() -> None:
    speed = Speed()
    speed.measured(0, 1.0)
    speed.measured(4, 0.0)
    assert speed.samples_per_s == 0


def test_a_speed_that_is_not_known_is_taken_to_be_the_mean() -> None:
    assert known([2.0, 0.0, 4.0]) == [2.0, 3.0, 4.0]
    assert known([0.0, 0.0]) == [1.0, 1.0]


@given(total=st.integers(0, 1000), weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
def test_parts_in_proportion_are_complete_and_off_by_less_than_one(total: int, weights: list[float]) -> None:
    cuts = bounds(total, weights)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, total, len(weights) + 1)
    for part, weight in zip((b - a for a, b in pairwise(cuts)), weights, strict=True):
        assert abs(part - total * weight / sum(weights)) <= 1 + 1e-6


STANDINGS = st.lists(
    st.builds(Standing, samples_per_s=st.floats(0.01, 1e4), pending=st.floats(0, 1e4)), min_size=1, max_size=8
)


@given(standings=STANDINGS, samples_per_step=st.integers(1, 200), steps_left=st.integers(1, 50), data=st.data())
def test_all_end_together_but_for_those_at_a_limit(
    standings: list[Standing], samples_per_step: int, steps_left: int, data: st.DataObject
) -> None:
    num_samples = len(standings) * samples_per_step * steps_left
    highest = data.draw(st.integers(samples_per_step, samples_per_step * len(standings))) * steps_left
    dealt = even_finish(standings, num_samples, steps_left, highest)
    assert math.isclose(sum(dealt), num_samples, rel_tol=1e-6)
    free = [
        (each.pending + samples) / each.samples_per_s
        for each, samples in zip(standings, dealt, strict=True)
        if steps_left * (1 + 1e-9) < samples < highest * (1 - 1e-9)
    ]
    assert not free or max(free) <= min(free) * (1 + 1e-6)


@given(
    num_slots=st.integers(1, 9),
    samples_per_step=st.integers(1, 70),
    limit=st.none() | st.integers(0, 99),
    data=st.data(),
)
def test_the_sizes_of_every_step_have_the_same_sum_and_stay_within_bounds(
    num_slots: int, samples_per_step: int, limit: int | None, data: st.DataObject
) -> None:
    highest = None if limit is None else samples_per_step + limit
    sizes = StepSizes(num_slots, samples_per_step, highest)
    standing = st.builds(Standing, samples_per_s=st.floats(0.01, 1e4), pending=st.floats(0, 1e3))
    for steps_left in range(12, 0, -1):
        standings = data.draw(st.lists(standing, min_size=num_slots, max_size=num_slots))
        step = sizes.next(standings, steps_left)
        assert sum(step) == num_slots * samples_per_step
        assert min(step) >= 1
        assert highest is None or max(step) <= highest


def test_noise_of_a_few_percent_moves_nothing() -> None:
    sizes = StepSizes(3, 64)
    rng = random.Random(1)
    for steps_left in range(100, 0, -1):
        standings = [Standing(100 * rng.uniform(0.99, 1.01), 64) for _ in range(3)]
        assert sizes.next(standings, steps_left) == (64, 64, 64)


def test_the_nearer_the_end_the_less_may_trainers_be_apart() -> None:
    sizes = StepSizes(2, 16)
    half_a_step = [Standing(16.0, 24.0), Standing(16.0, 16.0)]
    assert sizes.next(half_a_step, 100) == (16, 16), "of 100 seconds"
    assert sizes.next(half_a_step, 4) == (15, 17)
    a_sample = [Standing(16.0, 17.0), Standing(16.0, 16.0)]
    assert StepSizes(2, 16).next(a_sample, 3) == (16, 16), "another one would be late"


def test_half_a_sample_is_one_every_other_step() -> None:
    sizes = StepSizes(2, 64)
    speeds = [Standing(1505.0), Standing(95.0)]
    small = [sizes.next(speeds, 100 - step)[1] for step in range(40)]
    assert set(small) == {7, 8}
    assert sum(small) == pytest.approx(40 * 128 * 95 / 1600, abs=1)


# ---- whole rounds: the lease table as production uses it, with trainers whose steps last what a rule says

Lasts = Callable[[int, int, int], float]
"""Seconds of a step of this slot, with so many samples, in this round."""


@dataclass
class Swarm:
    """Trainers that lease, train and acknowledge, in the order of their times."""

    num_slots: int
    samples_per_step: int
    inner_steps: int
    lasts: Lasts
    table: LeaseTable = field(init=False)
    now_s: float = 0.0
    round: int = 0
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.table = LeaseTable(BatchStream(MANY, self.samples_per_step), deterministic=False)

    def play_round(self) -> tuple[list[float], list[list[int]]]:
        """Return when each slot was done, from the round's begin, and the sizes of its steps."""
        self.round += 1
        self.table.plan_round(self.round, self.num_slots, StepRange(0, self.inner_steps), self.speeds)
        begun_s = self.now_s
        free_at_s = [begun_s] * self.num_slots
        held: list[int | None] = [None] * self.num_slots
        sizes: list[list[int]] = [[] for _ in range(self.num_slots)]
        busy = set(range(self.num_slots))
        done_s = [0.0] * self.num_slots
        while busy:
            slot = min(busy, key=lambda each: (free_at_s[each], each))
            now_s = free_at_s[slot]
            if (lease := held[slot]) is not None:
                self.table.acknowledge(lease, committed=True, now_s=now_s)
            if len(sizes[slot]) == self.inner_steps:
                busy.discard(slot)
                done_s[slot] = now_s - begun_s
                continue
            grant = self.table.lease(slot, 1, self.round, len(sizes[slot]), now_s)
            assert isinstance(grant, Grant)
            self.table.begun(grant.lease, now_s)
            held[slot] = grant.lease
            sizes[slot].append(grant.batch.num_samples)
            free_at_s[slot] = now_s + self.lasts(slot, sizes[slot][-1], self.round)
        self.now_s = max(free_at_s)
        self.table.record(self.round, tuple(r for batch in leased(self.table).values() for r in batch.samples))
        for step in zip(*sizes, strict=True):
            assert sum(step) == self.num_slots * self.samples_per_step
        assert self.table.free == ()
        return done_s, sizes


def spread(done_s: Sequence[float]) -> float:
    return (max(done_s) - min(done_s)) / max(done_s)


@pytest.mark.parametrize("slower", [1, 2, 4, 16])
@pytest.mark.parametrize("overhead_s", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("inner_steps", [10, 50])
def test_two_trainers_end_together_however_much_slower_one_is(slower: int, overhead_s: float, inner_steps: int) -> None:
    swarm = Swarm(2, 64, inner_steps, lambda slot, num, _: overhead_s + num / 64 * (slower if slot else 1))
    spreads = [spread(swarm.play_round()[0]) for _ in range(6)]
    # A step of 7 or 8 samples is a tenth of a round of ten.
    assert max(spreads[1:]) < 0.1, spreads
    if inner_steps == 50:
        assert spreads[0] < 0.15, "within the first round as well"


def test_throughput_is_nearly_the_sum_of_both_alone() -> None:
    for slower in (4, 16):
        swarm = Swarm(2, 64, 20, lambda slot, num, _, slower=slower: num / 64 * (slower if slot else 1))
        swarm.play_round()
        done_s, _sizes = swarm.play_round()
        assert 128 * 20 / max(done_s) > 0.95 * 64 * (1 + 1 / slower)


@pytest.mark.parametrize("inner_steps", [6, 20])
def test_a_slow_trainer_that_becomes_fast_and_slow_again_is_followed(inner_steps: int) -> None:
    swarm = Swarm(2, 64, inner_steps, lambda slot, num, r: num / 64 * (4 if slot and not 4 < r <= 8 else 1))
    spreads = [spread(swarm.play_round()[0]) for _ in range(12)]
    for settled in (spreads[2:4], spreads[6:8], spreads[10:]):
        assert max(settled) < 0.1, spreads


def test_noise_does_not_keep_trainers_apart() -> None:
    rng = random.Random(3)
    swarm = Swarm(
        4,
        32,
        25,
        lambda slot, num, _: (0.02 + num / 64) * (1 + slot) * rng.uniform(0.85, 1.15) * (1 + (rng.random() < 0.02) * 3),
    )
    spreads = [spread(swarm.play_round()[0]) for _ in range(30)]
    assert sorted(spreads[2:])[len(spreads) // 2] < 0.06, spreads
    assert max(spreads[2:]) < 0.2, spreads


@pytest.mark.parametrize("seed", range(30))
def test_any_mix_of_speeds_comes_together_within_two_rounds(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(2, 6)
    speeds = [rng.uniform(1, 8) for _ in range(num_slots)]
    overheads_s = [rng.uniform(0, 2) for _ in range(num_slots)]
    swarm = Swarm(num_slots, 64, 30, lambda slot, num, _: overheads_s[slot] + num / speeds[slot])
    spreads = [spread(swarm.play_round()[0]) for _ in range(4)]
    assert max(spreads[2:]) < 0.08, spreads


def test_speeds_that_the_client_knows_hold_from_the_first_step_on() -> None:
    swarm = Swarm(2, 64, 8, lambda slot, num, _: num / 64 * (1 + 3 * slot), speeds=(64.0, 16.0))
    done_s, sizes = swarm.play_round()
    assert spread(done_s) < 0.1
    assert [step[0] for step in sizes] == [102, 26]
