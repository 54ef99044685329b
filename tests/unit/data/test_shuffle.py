"""The order of a pass."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.data.shuffle import PassOrder, permutation
from shoal.wire.messages.base import SampleRange

PINNED = [9, 8, 1, 4, 3, 6, 5, 7, 0, 2]


@pytest.mark.parametrize("num_samples", [1, 2, 1000])
def test_an_order_visits_every_sample_once(num_samples: int) -> None:
    order = permutation(3, 0, num_samples)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_samples))


def test_the_order_depends_on_seed_and_pass_and_nothing_else() -> None:
    orders = {(seed, number): tuple(permutation(seed, number, 100)) for seed in (0, 1) for number in (0, 1)}
    assert len(set(orders.values())) == 4
    assert tuple(permutation(1, 1, 100)) == orders[1, 1]


def test_the_order_is_the_same_in_every_version() -> None:
    assert permutation(0, 0, 10).tolist() == PINNED
    assert permutation(2**63 - 1, 7, 10).tolist() != PINNED


def test_samples_with_equal_keys_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ties:
        def __init__(self, key: object) -> None:
            pass

        def random_raw(self, size: int) -> np.ndarray:
            return np.arange(size, dtype=np.uint64)[::-1] // 50

    monkeypatch.setattr(np.random, "Philox", Ties)
    expected = [50 * tie + index for tie in reversed(range(20)) for index in range(50)]
    assert permutation(0, 0, 1000).tolist() == expected


def test_an_order_is_drawn_once_it_was_needed_and_three_are_kept() -> None:
    order = PassOrder(5, 20)
    ranges = [(SampleRange(number, 0, 3),) for number in range(4)]
    assert not order.drawn(ranges[0])
    first = order.indices(ranges[0]).tolist()
    assert order.drawn(ranges[0])
    for each in ranges[1:]:
        order.indices(each)
    assert [order.drawn(each) for each in ranges] == [False, True, True, True]
    assert order.indices(ranges[0]).tolist() == first


def test_a_batch_reads_its_positions_of_the_pass() -> None:
    order = PassOrder(5, 20)
    got = order.indices((SampleRange(1, 2, 5), SampleRange(1, 18, 20)))
    whole = permutation(5, 1, 20).tolist()
    assert got.tolist() == whole[2:5] + whole[18:]
