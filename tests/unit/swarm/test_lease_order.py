"""In an undisturbed deterministic run the batches depend on nothing but slot and step."""

from __future__ import annotations

import random

import pytest
from tests.windows import leased

from shoal.swarm.lease import Denial, LeaseTable
from shoal.swarm.sample_ranges import BatchStream, Ranges
from shoal.wire.messages.base import StepRange

INNER_STEPS = 3


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_undisturbed_deterministic_rounds_give_the_same_batches_in_any_order_of_requests(num_slots: int) -> None:
    def batches(seed: int) -> dict[tuple[int, int, int], Ranges]:
        rng = random.Random(seed)
        table = LeaseTable(BatchStream(23, 4), deterministic=True)
        got: dict[tuple[int, int, int], Ranges] = {}
        for round_number in range(1, 8):
            table.plan_round(round_number, num_slots, StepRange(0, INNER_STEPS))
            asked = {slot: 0 for slot in range(num_slots)}
            while asked:
                slot = rng.choice(list(asked))
                answer = table.lease(slot, 1, round_number, asked[slot])
                assert not isinstance(answer, Denial)
                got[round_number, slot, asked[slot]] = answer.batch.samples
                asked[slot] += 1
                if asked[slot] == INNER_STEPS:
                    del asked[slot]
            table.record(round_number, tuple(item for held in leased(table).values() for item in held.samples))
        return got

    first = batches(0)
    assert all(batches(seed) == first for seed in range(1, 20))
    # Nothing is lost between rounds: the stream without gaps, in the order of (round, step, slot).
    order = sorted(first, key=lambda at: (at[0], at[2], at[1]))
    stream = BatchStream(23, 4)
    assert [first[at] for at in order] == [(stream.range_of(number),) for number in range(len(order))]
