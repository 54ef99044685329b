"""Union and difference of sample ranges, against sets; the cut of passes into batches."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.swarm.sample_ranges import BatchStream, count, merge, subtract
from shoal.wire.messages.base import SampleRange

ranges = st.lists(
    st.builds(
        lambda number, start, length: SampleRange(number, start, start + length),
        st.integers(0, 2),
        st.integers(0, 20),
        st.integers(0, 8),
    ),
    max_size=8,
).map(tuple)


def positions(items: tuple[SampleRange, ...]) -> set[tuple[int, int]]:
    return {(item.pass_number, index) for item in items for index in range(item.start, item.stop)}


@given(ranges)
def test_a_union_holds_each_position_once_in_the_fewest_ranges(items: tuple[SampleRange, ...]) -> None:
    merged = merge(items)
    assert positions(merged) == positions(items)
    assert count(merged) == len(positions(items))
    for first, second in itertools.pairwise(merged):
        assert first.pass_number < second.pass_number or first.stop < second.start


@given(ranges, ranges)
def test_a_difference_holds_what_is_in_the_first_only(
    items: tuple[SampleRange, ...], taken: tuple[SampleRange, ...]
) -> None:
    merged = merge(items)
    left = subtract(merged, taken)
    assert positions(left) == positions(items) - positions(taken)
    assert all(item.start < item.stop for item in left)
    assert list(left) == sorted(left)


def test_a_difference_of_many_pieces_does_not_compare_each_with_each() -> None:
    compared = 0

    class Counting(SampleRange, frozen=True, order=True):
        def __lt__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return tuple(msgspec.structs.astuple(self)) < tuple(msgspec.structs.astuple(other))  # type: ignore[arg-type]

    pieces = tuple(Counting(0, 2 * number, 2 * number + 1) for number in range(300))
    assert subtract(pieces, pieces) == ()
    assert compared < 300 * 20


@pytest.mark.parametrize(("num_samples", "batch_samples"), [(10, 3), (9, 3), (1, 1), (2, 5)])
def test_batches_of_a_pass_cover_it_once_and_never_cross_into_the_next(num_samples: int, batch_samples: int) -> None:
    stream = BatchStream(num_samples, batch_samples)
    batches = [stream.range_of(number) for number in range(2 * stream.batches_per_pass)]
    assert merge(batches) == (SampleRange(0, 0, num_samples), SampleRange(1, 0, num_samples))
    assert count(batches) == 2 * num_samples
    sizes = [len(batch) for batch in batches[: stream.batches_per_pass]]
    assert all(size == min(batch_samples, num_samples) for size in sizes[:-1])


def test_an_empty_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        BatchStream(0, 4)
