"""Ranges of samples: union, difference, and the cut of an endless run of passes into batches.

A pass is one walk over all samples in a shuffled order; a range names positions of that order, so the same machine
works for every data source and every seed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import MAX_RECORDED

Ranges = tuple[SampleRange, ...]


def merge(ranges: Iterable[SampleRange]) -> Ranges:
    """Return the union of `ranges`, sorted, without empty, overlapping or touching ranges."""
    merged: list[SampleRange] = []
    for item in sorted(ranges):
        if item.stop <= item.start:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.pass_number == item.pass_number and item.start <= last.stop:
            merged[-1] = SampleRange(last.pass_number, last.start, max(last.stop, item.stop))
        else:
            merged.append(item)
    return tuple(merged)


def subtract(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return the parts of `ranges` that lie in none of `taken`, in the order of `ranges`."""
    left: list[SampleRange] = []
    cuts = merge(taken)
    for item in ranges:
        start = item.start
        # A peer may have said hundreds of thousands of ranges: not each is compared with each.
        for number in range(first_behind(cuts, item), len(cuts)):
            cut = cuts[number]
            if cut.pass_number != item.pass_number or cut.start >= item.stop:
                break
            if cut.start > start:
                left.append(SampleRange(item.pass_number, start, cut.start))
            start = cut.stop
        if start < item.stop:
            left.append(SampleRange(item.pass_number, start, item.stop))
    return tuple(left)


def first_behind(cuts: Ranges, item: SampleRange) -> int:
    """Return the number of the first of these merged ranges that ends behind where `item` begins, in its pass or a
    later one."""
    return bisect_right(cuts, (item.pass_number, item.start), key=lambda cut: (cut.pass_number, cut.stop))


def lowest(ranges: Iterable[SampleRange]) -> Ranges:
    """Return the union of `ranges`, of which a record can name no more than the first `MAX_RECORDED`.

    Batches are dealt in order, so what is used lies together but for what is under way. Only who makes samples up puts
    so many ranges before the highest ones; those are then as if nobody had said them.
    """
    return merge(ranges)[:MAX_RECORDED]


def count(ranges: Iterable[SampleRange]) -> int:
    """Return how many samples `ranges` hold together, counting overlaps twice."""
    return sum(len(item) for item in ranges)


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """What one step trains on: non-empty ranges of one pass, in the order of the pass."""

    samples: Ranges

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return count(self.samples)


class RecordedSamples:
    """Every sample that a round record contains, as far as the next one can name them.

    Attributes:
        samples: all of them, merged.
    """

    def __init__(self) -> None:
        self.samples: Ranges = ()

    def add(self, samples: Ranges) -> None:
        """A record is committed with these samples."""
        self.samples = lowest((*self.samples, *samples))

    def left_of(self, batch: Batch) -> Batch | None:
        """Return what of a batch is in no record, or None if that is nothing."""
        last = batch.samples[-1]
        begin = first_behind(self.samples, batch.samples[0])
        end = bisect_left(self.samples, (last.pass_number, last.stop), key=lambda item: (item.pass_number, item.start))
        if begin >= end:
            return batch
        left = subtract(batch.samples, self.samples[begin:end])
        return Batch(left) if left else None


@dataclass(frozen=True, slots=True)
class BatchStream:
    """Pass after pass over `num_samples` samples, cut into batches of `batch_samples`; the last one of a pass is short.

    Attributes:
        num_samples: samples of one pass, at least 1.
        batch_samples: samples of a full batch, at least 1.
    """

    num_samples: int
    batch_samples: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ConfigError: a size is below 1.
        """
        if self.num_samples < 1 or self.batch_samples < 1:
            raise ConfigError(
                f"a stream of {self.num_samples} samples in batches of {self.batch_samples} is empty: "
                "choose a larger data set (data.dataset_name), a shorter data.seq_len or a positive batch size"
            )

    @property
    def batches_per_pass(self) -> int:
        """Number of batches of one pass, the short one included."""
        return -(-self.num_samples // self.batch_samples)

    def range_of(self, number: int) -> SampleRange:
        """Return the samples of batch `number` (0-based, counted over all passes)."""
        pass_number, index = divmod(number, self.batches_per_pass)
        start = index * self.batch_samples
        return SampleRange(pass_number, start, min(start + self.batch_samples, self.num_samples))

    def contains(self, item: SampleRange) -> bool:
        """Return whether `item` lies inside a pass of this stream."""
        return item.pass_number >= 0 and 0 <= item.start <= item.stop <= self.num_samples


def within(ranges: Ranges, num_samples: int) -> Ranges:
    """Return what of `ranges` a pass over so many samples has."""
    clipped = (SampleRange(item.pass_number, item.start, min(item.stop, num_samples)) for item in ranges)
    return tuple(item for item in clipped if item.start < item.stop)
