"""The samples that nobody has: those that came back, and all from a cursor on, pass after pass. Pure state.

took, put back ...|  cursor -> new samples, without those that somebody is known to have (`remove`)
"""

from __future__ import annotations

from typing import Self

from shoal.swarm.sample_ranges import Ranges, count, first_behind, lowest, merge, subtract
from shoal.wire.messages.base import SampleRange


class UnusedSamples:
    """Hands out ranges of any size; every sample of a pass is out exactly once until it is put back."""

    def __init__(self, num_samples: int) -> None:
        """Begin with all passes unused.

        Args:
            num_samples: of one pass, at least 1.
        """
        self._num_samples = num_samples
        self._returned: Ranges = ()
        self._pass, self._start = 0, 0
        # At or after the cursor: in a record, or somebody's already.
        self._skipped: Ranges = ()

    @property
    def returned(self) -> Ranges:
        """What was put back and not handed out again, merged."""
        return self._returned

    def copy(self) -> Self:
        """Return another one in the same state."""
        other = type(self)(self._num_samples)
        other._returned, other._skipped = self._returned, self._skipped
        other._pass, other._start = self._pass, self._start
        return other

    def take(self, num_samples: int) -> Ranges:
        """Hand out `num_samples` (at least 1) samples of one pass, or as many as it has left.

        What came back goes first.
        """
        taken: list[SampleRange] = []
        while (
            num_samples and self._returned and self._returned[0].pass_number == (taken or self._returned)[0].pass_number
        ):
            first, *rest = self._returned
            stop = min(first.stop, first.start + num_samples)
            taken.append(SampleRange(first.pass_number, first.start, stop))
            left = (SampleRange(first.pass_number, stop, first.stop),) if stop < first.stop else ()
            self._returned = (*left, *rest)
            num_samples -= len(taken[-1])
        while num_samples and (not taken or taken[0].pass_number == self._pass):
            new = self._next_new(num_samples)
            if new is not None:
                taken.append(new)
                self._start = new.stop
                num_samples -= len(new)
            elif taken:
                break
            else:
                self._pass, self._start = self._pass + 1, 0
                self._skipped = self._skipped[self._first_skipped() :]
        return merge(taken)

    def put_back(self, samples: Ranges) -> None:
        """Nobody has these samples any more; they were handed out here, or removed."""
        self._returned = merge((*self._returned, *samples))

    def remove(self, samples: Ranges) -> None:
        """Somebody has these samples, or a record contains them."""
        self._returned = subtract(self._returned, samples)
        ahead = (item for item in samples if (item.pass_number, item.stop) > (self._pass, self._start))
        self._skipped = lowest((*self._skipped, *ahead))

    def has(self, samples: Ranges) -> bool:
        """Return whether nobody has any of these samples, and all exist."""
        new = subtract(samples, self._returned)
        return (
            count(samples) == count(merge(samples))
            and all(0 <= item.start < item.stop <= self._num_samples for item in samples)
            and all((item.pass_number, item.start) >= (self._pass, self._start) for item in new)
            and subtract(new, self._skipped) == new
        )

    def _next_new(self, limit: int) -> SampleRange | None:
        """Return the next new samples of the cursor's pass that lie together, at most `limit`; None: there are none."""
        start, stop = self._start, self._num_samples
        # A peer may have said any number of ranges: not each is looked at for each batch.
        for number in range(self._first_skipped(), len(self._skipped)):
            item = self._skipped[number]
            if item.pass_number != self._pass:
                break
            if item.start > start:
                stop = item.start
                break
            start = item.stop
        return SampleRange(self._pass, start, min(stop, start + limit)) if start < stop else None

    def _first_skipped(self) -> int:
        """Return the number of the first skipped range that ends behind the cursor."""
        return first_behind(self._skipped, SampleRange(self._pass, self._start, self._start))
