"""Which batch a step gets in a deterministic run: all have the same size, and slot and step say which. Pure state.

Slot `slot` gets batch `base + step * num_slots + slot` of the stream at step `step` of a round, where `base` counts
what earlier rounds were given; batches that became free take the first numbers of the next round, in their order in the
data.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

from shoal.swarm.deal import NO_PLACE
from shoal.swarm.sample_ranges import Batch, BatchStream, Ranges, RecordedSamples


class FixedDeal:
    """A `swarm.deal.Deal`. `_waiting` holds the batches that are numbered and not leased."""

    def __init__(self, stream: BatchStream, recorded: RecordedSamples) -> None:
        """Begin at the start of the stream.

        Args:
            recorded: the owner keeps it up to date; its samples are not dealt.
        """
        self._stream = stream
        self._recorded = recorded
        self._next_number = 0
        self._free: list[Batch] = []
        self._freed = deque[Batch]()
        self._waiting: dict[int, Batch] = {}
        self._numbered = self._num_slots = self._inner_steps = 0
        self._is_resumed = False

    @property
    def free(self) -> tuple[Batch, ...]:
        return tuple(sorted([*self._free, *self._freed, *self._waiting.values()]))

    def plan(self, num_slots: int, inner_steps: int, speeds: Sequence[float], *, is_resumed: bool) -> None:
        """See `Deal.plan`; speeds do not matter."""
        self._freed = deque(self.free)
        self._free = []
        self._waiting = {}
        self._numbered, self._num_slots, self._inner_steps = 0, num_slots, inner_steps
        self._is_resumed = is_resumed

    def deal(self, slot: int, step: int, now_s: float) -> tuple[int, Batch] | None:
        """See `Deal.deal`; else the first batch that this slot has not been given.

        The second case is a trainer that does not know which steps a predecessor has done.
        """
        steps = chain((step,), () if self._is_resumed else range(self._inner_steps))
        for index in (wanted * self._num_slots + slot for wanted in steps):
            while self._numbered <= index:
                self._number_next()
            if index in self._waiting:
                return index, self._waiting.pop(index)
        return None

    def claim(self, samples: Ranges) -> int | None:
        batch = Batch(samples)
        limit = self._numbered + len(self._freed) + self._num_slots * self._inner_steps
        while batch not in self._waiting.values() and self._numbered < limit:
            self._number_next()
        index = next((number for number, waiting in self._waiting.items() if waiting == batch), None)
        if index is not None:
            del self._waiting[index]
        return index

    def begun(self, index: int, now_s: float) -> None:
        """See `Deal.begun`: time does not matter."""

    def trained(self, index: int, now_s: float) -> None:
        """See `Deal.trained`: time does not matter."""

    def put_back(self, index: int, batch: Batch) -> None:
        if index == NO_PLACE:
            bisect.insort(self._free, batch)
        else:
            self._waiting[index] = batch

    def recorded(self, samples: Ranges) -> None:
        left_of = self._recorded.left_of
        self._free = [left for left in map(left_of, self._free) if left is not None]
        self._freed = deque(left for left in map(left_of, self._freed) if left is not None)
        remaining = ((index, left_of(batch)) for index, batch in self._waiting.items())
        self._waiting = {index: left for index, left in remaining if left is not None}

    def upcoming(self, limit: int) -> tuple[Batch, ...]:
        found = [self._waiting[index] for index in sorted(self._waiting)] + list(self._freed) + self._free
        if len(found) < limit:
            for _, batch in self._new_batches():
                found.append(batch)
                if len(found) >= limit:
                    break
        return tuple(found[:limit])

    def _new_batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number, batch) of the stream from the cursor on, without what is recorded already."""
        number = self._next_number
        while True:
            left = self._recorded.left_of(Batch((self._stream.range_of(number),)))
            if left is not None:
                yield number, left
            number += 1

    def _number_next(self) -> None:
        """Give the next number of the plan to the next batch."""
        if self._freed:
            batch = self._freed.popleft()
        else:
            number, batch = next(self._new_batches())
            self._next_number = number + 1
        self._waiting[self._numbered] = batch
        self._numbered += 1
