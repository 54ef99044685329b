"""Which batch a step gets where shares follow speed: the next samples, as many as `swarm.shares` says. Pure state.

    sizes of a step: fixed when the first trainer is given the step before it
    samples of a trainer's step: kept for it from when it is given the step before, so that they can be prepared ahead

What became free goes to whoever is dealt to next, joined with new samples or cut as the size wants it; a batch lies in
one pass, so the last one of a pass may be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Self

from shoal.swarm.deal import NO_PLACE
from shoal.swarm.sample_ranges import Batch, BatchStream, Ranges, count, first_behind, lowest, merge, subtract
from shoal.swarm.shares import OVERDUE, Speed, Standing, StepSizes, known
from shoal.wire.messages.base import SampleRange


@dataclass(slots=True)
class _Training:
    """The batch that a slot is training on, since `begun_s`."""

    index: int
    num_samples: int
    begun_s: float


@dataclass(slots=True)
class _Slot:
    """One trainer's place in the round.

    Attributes:
        next_step: the lowest step that it may still ask for.
        ahead: samples of the steps from there on, as far as their sizes are fixed.
    """

    speed: Speed = field(default_factory=Speed)
    next_step: int = 0
    ahead: int = 0
    training: _Training | None = None


class SharedDeal:
    """A `swarm.deal.Deal` whose batches are as large as their trainers are fast."""

    def __init__(self, stream: BatchStream, max_samples: int | None) -> None:
        """Begin at the start of the stream.

        Args:
            stream: the mean of the step sizes is its batch.
            max_samples: of a batch; None: any number.
        """
        self._samples_per_step = stream.batch_samples
        self._max_samples = max_samples
        self._unused = UnusedSamples(stream.num_samples)
        self._inner_steps = 0
        self._slots = [_Slot()]
        self._step_sizes = StepSizes(1, self._samples_per_step)
        self._latest = (self._samples_per_step,)
        # By step; all steps below `_num_fixed` but for those that were dealt before this deal began anew.
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._num_fixed = 0
        # By index, step * num_slots + slot: what a trainer will be given next.
        self._kept: dict[int, Batch] = {}

    @property
    def free(self) -> tuple[Batch, ...]:
        return tuple(sorted([*(Batch((item,)) for item in self._unused.returned), *self._kept.values()]))

    def plan(self, num_slots: int, inner_steps: int, speeds: Sequence[float], *, is_resumed: bool) -> None:
        for batch in self._kept.values():
            self._unused.put_back(batch.samples)
        self._kept, self._sizes, self._num_fixed, self._inner_steps = {}, {}, 0, inner_steps
        if num_slots != len(self._slots):
            self._slots = [_Slot() for _ in range(num_slots)]
            self._step_sizes = StepSizes(num_slots, self._samples_per_step, self._max_samples)
        given = speeds or (0.0,) * num_slots
        self._slots = [_Slot(Speed(new) if new else old.speed) for new, old in zip(given, self._slots, strict=True)]
        if not is_resumed:
            for slot in range(num_slots):
                self._keep(slot, 0, 0.0)  # nobody trains yet, so the time does not matter

    def deal(self, slot: int, step: int, now_s: float) -> tuple[int, Batch]:
        """See `Deal.deal`: there is always something."""
        index = self._keep(slot, step, now_s)
        batch = self._kept.pop(index)
        place = self._slots[slot]
        self._move(slot, step + 1)
        place.training = _Training(index, batch.num_samples, now_s)
        if step + 1 < self._inner_steps:
            self._keep(slot, step + 1, now_s)
        return index, batch

    def begun(self, index: int, now_s: float) -> None:
        training = self._slots[index % len(self._slots)].training
        if training is not None and training.index == index:
            training.begun_s = now_s

    def trained(self, index: int, now_s: float) -> None:
        place = self._slots[index % len(self._slots)]
        if place.training is not None and place.training.index == index:
            place.speed.measured(place.training.num_samples, now_s - place.training.begun_s)
            place.training = None

    def claim(self, samples: Ranges) -> int | None:
        """See `Deal.claim`; which step they belong to is not known."""
        if not samples or not self._unused.has(samples):
            return None
        self._unused.remove(samples)
        return NO_PLACE

    def put_back(self, index: int, batch: Batch) -> None:
        self._unused.put_back(batch.samples)
        if index == NO_PLACE:
            return
        step, slot = divmod(index, len(self._slots))
        place = self._slots[slot]
        if place.training is not None and place.training.index == index:
            place.training = None
        if step < place.next_step:
            self._move(slot, step)

    def recorded(self, samples: Ranges) -> None:
        self._unused.remove(samples)
        remaining = ((index, subtract(batch.samples, samples)) for index, batch in self._kept.items())
        self._kept = {index: Batch(left) for index, left in remaining if left}

    def upcoming(self, limit: int) -> tuple[Batch, ...]:
        if self._kept:
            return tuple(self._kept[index] for index in sorted(self._kept)[:limit])
        unused = self._unused.copy()
        sizes = islice(cycle(self._latest), limit)
        return tuple(Batch(unused.take(size)) for size in sizes)

    def _keep(self, slot: int, step: int, now_s: float) -> int:
        """Keep samples for a slot's step, if there are none yet; return the index."""
        index = step * len(self._slots) + slot
        if index not in self._kept:
            self._fix(step, now_s)
            self._kept[index] = Batch(self._unused.take(self._sizes[step][slot]))
        return index

    def _fix(self, step: int, now_s: float) -> None:
        """Fix the sizes of a step, if they are not."""
        if step in self._sizes:
            return
        between = sum(other not in self._sizes for other in range(step, self._num_fixed))
        steps_left = between + self._inner_steps - max(step, self._num_fixed)
        self._latest = self._step_sizes.next(self._standings(now_s), steps_left, self._inner_steps)
        self._sizes[step] = self._latest
        self._num_fixed = max(self._num_fixed, step + 1)
        for place, size in zip(self._slots, self._latest, strict=True):
            if step >= place.next_step:
                place.ahead += size

    def _standings(self, now_s: float) -> list[Standing]:
        standings: list[Standing] = []
        for place, usual in zip(self._slots, known([each.speed.samples_per_s for each in self._slots]), strict=True):
            speed, left = usual, 0.0
            if (training := place.training) is not None:
                passed_s = now_s - training.begun_s
                if passed_s * usual > OVERDUE * training.num_samples:
                    speed = training.num_samples / passed_s
                left = max(0.0, training.num_samples - speed * passed_s)
            standings.append(Standing(speed, place.ahead + left))
        return standings

    def _move(self, slot: int, next_step: int) -> None:
        """A slot goes on at another step: the next one, further ahead after a takeover, or again one it gave back."""
        place = self._slots[slot]
        for step in range(place.next_step, next_step):
            place.ahead -= self._sizes[step][slot] if step in self._sizes else 0
            skipped = self._kept.pop(step * len(self._slots) + slot, None)
            if skipped is not None:
                self._unused.put_back(skipped.samples)
        for step in range(next_step, place.next_step):
            place.ahead += self._sizes[step][slot] if step in self._sizes else 0
        place.next_step = next_step


class UnusedSamples:
    """Hands out ranges of any size; every sample of a pass is out exactly once until it is put back.

    took, put back ...|  cursor -> new samples, without those that somebody is known to have (`remove`)

    Attributes:
        returned: What was put back and not handed out again, merged.
    """

    def __init__(self, num_samples: int) -> None:
        """Begin with all passes unused.

        Args:
            num_samples: of one pass, at least 1.
        """
        self._num_samples = num_samples
        self.returned: Ranges = ()
        self._pass, self._start = 0, 0
        # At or after the cursor: in a record, or somebody's already.
        self._skipped: Ranges = ()

    def copy(self) -> Self:
        """Return another one in the same state."""
        other = type(self)(self._num_samples)
        other.returned, other._skipped = self.returned, self._skipped
        other._pass, other._start = self._pass, self._start
        return other

    def take(self, num_samples: int) -> Ranges:
        """Hand out `num_samples` (at least 1) samples of one pass, or as many as it has left.

        What came back goes first.
        """
        taken: list[SampleRange] = []
        while num_samples and self.returned and self.returned[0].pass_number == (taken or self.returned)[0].pass_number:
            first, *rest = self.returned
            stop = min(first.stop, first.start + num_samples)
            taken.append(SampleRange(first.pass_number, first.start, stop))
            left = (SampleRange(first.pass_number, stop, first.stop),) if stop < first.stop else ()
            self.returned = (*left, *rest)
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
        self.returned = merge((*self.returned, *samples))

    def remove(self, samples: Ranges) -> None:
        """Somebody has these samples, or a record contains them."""
        self.returned = subtract(self.returned, samples)
        ahead = (item for item in samples if (item.pass_number, item.stop) > (self._pass, self._start))
        self._skipped = lowest((*self._skipped, *ahead))

    def has(self, samples: Ranges) -> bool:
        """Return whether nobody has any of these samples, and all exist."""
        new = subtract(samples, self.returned)
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
