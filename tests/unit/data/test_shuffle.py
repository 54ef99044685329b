"""The order of a pass."""

from __future__ import annotations

import tracemalloc
from itertools import chain, pairwise

import numpy as np
import pytest

from shoal.data.fields import Fields
from shoal.data.shuffle import PassOrder, permutation
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source
from shoal.wire.messages.base import SampleRange

PINNED_IN_WINDOW = [51, 32, 53, 13, 1, 28, 61, 16, 9, 17, 0, 39]
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


class Advised(Source):
    """Notes what it is told of what comes next."""

    inputs = ArraySpec("float32", (1,))
    labels = ArraySpec("int64", ())

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.told: list[tuple[int, int, bool]] = []

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:
        self.told.append((start, stop, is_needed))

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.labels[...] = indices


@pytest.mark.parametrize(("num_samples", "window"), [(1, 5), (17, 16), (100, 7), (1000, 64), (1003, 64), (1024, 1023)])
def test_with_a_window_a_pass_visits_every_sample_once_in_an_order_of_seed_and_pass_alone(
    num_samples: int, window: int
) -> None:
    def order(seed: int, pass_number: int, batch: int) -> list[int]:
        drawn = PassOrder(seed, num_samples, window=window)
        cuts = [*range(0, num_samples, batch), num_samples]
        ranges = [(SampleRange(pass_number, start, stop),) for start, stop in pairwise(cuts)]
        return [index for each in ranges for index in drawn.indices(each).tolist()]

    first = order(3, 0, num_samples)
    assert sorted(first) == list(range(num_samples))
    assert all(order(3, 0, batch) == first for batch in (1, 5, 64))
    if num_samples > 16:
        assert len({tuple(first), tuple(order(4, 0, 64)), tuple(order(3, 1, 64))}) == 3


def test_a_position_is_the_same_sample_whoever_asks_for_it_first() -> None:
    whole = PassOrder(5, 1003, window=64).indices((SampleRange(2, 0, 1003),)).tolist()
    later = PassOrder(5, 1003, window=64)
    assert later.indices((SampleRange(2, 900, 1003), SampleRange(2, 3, 70))).tolist() == [*whole[900:], *whole[3:70]]


def test_the_order_of_a_window_is_the_same_in_every_version() -> None:
    assert PassOrder(0, 80, window=32).indices((SampleRange(0, 0, 12),)).tolist() == PINNED_IN_WINDOW


def test_the_samples_of_a_window_lie_in_sixteen_places_of_which_the_source_is_told_before() -> None:
    source = Advised(10_000)
    order = PassOrder.of(DataSet("numbers", source, source, num_classes=2, shuffle_window=640), 1)
    read: list[list[tuple[int, int]]] = []
    told: list[list[tuple[int, int]]] = []
    given_up: list[tuple[int, int]] = []
    for start in range(0, 10_000, 640):
        samples = order.indices((SampleRange(0, start, min(start + 640, 10_000)),)).tolist()
        assert samples != sorted(samples)
        read.append([(40 * group, 40 * group + 40) for group in sorted({index // 40 for index in samples})])
        told.append(sorted((first, stop) for first, stop, is_needed in source.told if is_needed))
        given_up += [(first, stop) for first, stop, is_needed in source.told if not is_needed]
        source.told.clear()
    assert [len(groups) for groups in read] == [16] * 15 + [10]
    assert told == [*read[1:], []]
    assert sorted(given_up) == sorted(chain(*read[:-3])), "the last three windows are kept"


def test_all_samples_at_once_are_read_at_random_and_nothing_is_told() -> None:
    source = Advised(100)
    order = PassOrder.of(DataSet("numbers", source, source, num_classes=2), 1)
    assert order.indices((SampleRange(0, 0, 100),)).tolist() == permutation(1, 0, 100).tolist()
    assert source.told == []


def test_an_order_of_a_billion_samples_takes_a_window_of_memory() -> None:
    order = PassOrder(5, 10**9, window=1 << 20)
    tracemalloc.start()
    try:
        for start in (0, 10**8, 10**9 - 64):
            samples = order.indices((SampleRange(0, start, start + 64),))
            assert len(set(samples.tolist())) == 64
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 96 << 20
