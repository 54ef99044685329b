"""Who trains on which samples: every sample of a pass goes to exactly one committed step. Pure state, no I/O.

    free --lease--> leased --acknowledge--> done --record--> recorded
      ^               |                      |
      +-- given back, released, or in no record of its round

The unit is a batch: a range of the shuffled order of one pass. A batch is free until it is leased. Only the record of
a round makes it recorded; what was leased in that round and is not in the record becomes free, and what is free is
handed out before anything new. The lease of a trainer that has died moves only when its steps are settled
(`release_trainer`) or when a record without it is decided: until then a replica may still commit it.

In a deterministic run, trainer `slot` gets batch `base + step * num_slots + slot` of the stream at step `step` of a
round, where `base` counts what earlier rounds were given; batches that became free take the first numbers of the next
round, in their order in the data. Otherwise whoever asks first gets the first batch.

Source: docs/protocol.md, "The feed".
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from shoal.errors import RemoteProtocolError
from shoal.ids import StepKey
from shoal.swarm.sample_ranges import BatchStream, Ranges, count, merge, subtract

MAX_PLANNED_BATCHES = 10_000_000
"""A round plan with more steps than this over all slots is refused as nonsense."""


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """What one step trains on: non-empty ranges of one pass, in the order of the pass."""

    samples: Ranges

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return count(self.samples)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease was given: `lease` names it in later calls."""

    lease: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Denial:
    """No lease, and why; the reason is shown to people."""

    reason: str


@dataclass(slots=True)
class _Lease:
    trainer: int
    incarnation: int
    round: int
    index: int
    """Number of the batch within the round's plan; -1 where there is no plan to return it to."""
    batch: Batch
    keys: set[StepKey] = field(default_factory=lambda: set[StepKey]())
    done: bool = False


@dataclass(slots=True)
class _Plan:
    """The batches of one round. They are numbered when they are needed: first those that were free when the round was
    planned, then new ones from the stream. `waiting` holds those that are numbered and not leased. `resumed`: what dead
    trainers had leased is not known; `closed`: so nothing more can be leased."""

    round: int = 0
    num_slots: int = 0
    inner_steps: int = 0
    freed: deque[Batch] = field(default_factory=lambda: deque[Batch]())
    numbered: int = 0
    waiting: dict[int, Batch] = field(default_factory=lambda: dict[int, Batch]())
    resumed: bool = False
    closed: bool = False


class LeaseTable:
    """The state of every sample. All methods are total: a call that makes no sense changes nothing or is denied."""

    def __init__(self, stream: BatchStream, *, deterministic: bool) -> None:
        """Start with every sample free and no round planned."""
        self.stream = stream
        self._deterministic = deterministic
        self._next_number = 0
        self._free: list[Batch] = []
        self._plan = _Plan()
        self._leases: dict[int, _Lease] = {}
        self._num_grants = 0
        self._lowest_incarnation: dict[int, int] = {}
        self._recorded: dict[int, Ranges] = {}

    @property
    def planned_round(self) -> int:
        """The latest round that was planned; 0 before the first."""
        return self._plan.round

    @property
    def recorded(self) -> Ranges:
        """Every sample that a round record contains, merged."""
        return merge(item for ranges in self._recorded.values() for item in ranges)

    @property
    def leased(self) -> dict[int, Batch]:
        """The batches that are leased or done, by lease."""
        return {number: lease.batch for number, lease in self._leases.items()}

    @property
    def free(self) -> tuple[Batch, ...]:
        """The batches that were cut from the stream and are nobody's now, in the order of the data."""
        return tuple(sorted([*self._free, *self._plan.freed, *self._plan.waiting.values()]))

    def plan_round(self, round_number: int, num_slots: int, inner_steps: int) -> None:
        """Open a round; what earlier plans did not hand out comes first. Repeating the same plan changes nothing.

        A second plan for the same round replaces the first for what is not leased yet; one of an earlier round is
        ignored.

        Raises:
            RemoteProtocolError: a size is not positive, or the plan is absurdly large.
        """
        if num_slots < 1 or inner_steps < 1 or num_slots * inner_steps > MAX_PLANNED_BATCHES:
            raise RemoteProtocolError(f"a round of {num_slots} slots x {inner_steps} steps cannot be planned")
        plan = self._plan
        same = (plan.round, plan.num_slots, plan.inner_steps) == (round_number, num_slots, inner_steps)
        if round_number < plan.round or same:
            return
        freed = deque(self.free)
        for lease in self._leases.values():
            lease.index = -1
        self._free = []
        self._plan = _Plan(round_number, num_slots, inner_steps, freed)

    def lease(self, trainer: int, incarnation: int, round_number: int, step: int) -> Grant | Denial:
        """Give trainer (slot) `trainer` the batch of step `step` (0-based in the round), if there is one for it."""
        plan = self._plan
        if round_number != plan.round:
            return Denial(f"round {round_number} is not open: the planned round is {plan.round}")
        if not (0 <= step < plan.inner_steps and 0 <= trainer < plan.num_slots):
            return Denial(
                f"step {step} of slot {trainer} is outside the plan of round {plan.round}: "
                f"{plan.num_slots} slots, {plan.inner_steps} steps each"
            )
        if plan.closed:
            return Denial(f"round {plan.round} ends here: it is not known what else was leased in it")
        if incarnation < self._lowest_incarnation.get(trainer, 0):
            return Denial(f"incarnation {incarnation} of trainer {trainer} is stale: a later one has taken its place")
        self._lowest_incarnation[trainer] = incarnation
        index = self._index_for(trainer, step) if self._deterministic else self._first_index()
        if index is None:
            return Denial(f"every batch of slot {trainer} in round {plan.round} has been handed out")
        batch = plan.waiting.pop(index)
        self._num_grants += 1
        self._leases[self._num_grants] = _Lease(trainer, incarnation, round_number, index, batch)
        return Grant(self._num_grants, batch)

    def resume_round(self, round_number: int, num_slots: int, inner_steps: int, *, complete: bool) -> None:
        """Open a round in whose middle this table begins anew; `resume` then tells what its trainers have leased.

        The records so far have to be known, then the batches have the numbers that they had. Without `complete`, others
        have leased batches too. In a deterministic run those are told by slot and step, which nobody asks for again;
        otherwise nothing more is leased in this round.

        Raises:
            RemoteProtocolError: as `plan_round`.
        """
        self.plan_round(round_number, num_slots, inner_steps)
        self._plan.resumed = True
        self._plan.closed = not complete and not self._deterministic

    def resume(
        self, trainer: int, incarnation: int, samples: Ranges, keys: tuple[StepKey, ...], *, done: bool
    ) -> int | None:
        """Take over a lease of the resumed round; returns None, and leases nothing more, if there is no such batch."""
        plan = self._plan
        batch = Batch(samples)
        limit = plan.numbered + len(plan.freed) + plan.num_slots * plan.inner_steps
        while batch not in plan.waiting.values() and plan.numbered < limit:
            self._number_next()
        index = next((number for number, waiting in plan.waiting.items() if waiting == batch), None)
        if index is None:
            plan.closed = True
            return None
        del plan.waiting[index]
        self._num_grants += 1
        self._leases[self._num_grants] = _Lease(trainer, incarnation, plan.round, index, batch, set(keys), done)
        return self._num_grants

    def forgo(self) -> None:
        """A trainer of the resumed round has died and took with it what it had leased; see `resume_round`."""
        self._plan.closed = self._plan.closed or not self._deterministic

    def note(self, lease: int, key: StepKey) -> None:
        """Remember that attempt `key` trains on the leased batch; told before any replica hears of the attempt."""
        held = self._leases.get(lease)
        if held is not None and key[:2] == (held.trainer, held.incarnation):
            held.keys.add(key)

    def acknowledge(self, lease: int, *, committed: bool) -> None:
        """The trainer is through with the lease: done, or (`committed` false) left to the round's record."""
        held = self._leases.get(lease)
        if held is not None and committed:
            held.done = True

    def give_back(self, lease: int) -> bool:
        """Free an unused lease; returns False, and changes nothing, if an attempt was noted: its fate is open."""
        held = self._leases.get(lease)
        if held is None or held.keys or held.done:
            return False
        self._free_lease(lease)
        return True

    def release_trainer(self, trainer: int, incarnation: int, committed: tuple[StepKey, ...]) -> tuple[int, ...]:
        """Settle all leases of this incarnation of `trainer`, and refuse it and earlier ones from now on.

        Leases with a noted attempt in `committed` are done, the others are free. If `committed` names an attempt that
        no lease has noted (the note died with the trainer), the leases without a note may be its: they wait for the
        record.

        Returns:
            The leases of that trainer; nobody uses their bytes any more.
        """
        self._lowest_incarnation[trainer] = max(self._lowest_incarnation.get(trainer, 0), incarnation + 1)
        # Of exactly this incarnation: `committed` says nothing about leases of an earlier one that wait for the record.
        theirs = [n for n, held in self._leases.items() if (held.trainer, held.incarnation) == (trainer, incarnation)]
        noted = {key for number in theirs for key in self._leases[number].keys}
        unknown = set(committed) - noted
        for number in theirs:
            held = self._leases[number]
            if held.keys.intersection(committed):
                held.done = True
            elif not held.done and not (unknown and not held.keys):
                self._free_lease(number)
        return tuple(theirs)

    def record(self, round_number: int, samples: Ranges) -> tuple[int, ...]:
        """D_`round_number` is decided with `samples` (of skipped steps too); whatever else was leased up to it is free.

        Returns:
            The leases that ended.

        Raises:
            RemoteProtocolError: a range lies outside the data.
        """
        strange = [item for item in samples if not self.stream.contains(item)]
        if strange:
            raise RemoteProtocolError(f"record {round_number} names {strange[0]}; a pass has {self.stream.num_samples}")
        for pass_number in {item.pass_number for item in samples}:
            new = (item for item in samples if item.pass_number == pass_number)
            self._recorded[pass_number] = merge((*self._recorded.get(pass_number, ()), *new))
        ended = [number for number, held in self._leases.items() if held.round <= round_number]
        for number in ended:
            self._free_lease(number)
        # A batch that was free already may be in the record all the same, e.g. in the first records after a restart.
        self._free = [left for left in map(self._unrecorded, self._free) if left is not None]
        self._plan.freed = deque(left for left in map(self._unrecorded, self._plan.freed) if left is not None)
        remaining = ((index, self._unrecorded(batch)) for index, batch in self._plan.waiting.items())
        self._plan.waiting = {index: left for index, left in remaining if left is not None}
        return tuple(ended)

    def upcoming(self, limit: int) -> tuple[Batch, ...]:
        """Return the next `limit` batches that trainers will be given if nothing goes wrong; changes nothing."""
        plan = self._plan
        found = [plan.waiting[index] for index in sorted(plan.waiting)] + list(plan.freed) + self._free
        if len(found) < limit:
            for _, batch in self._new_batches():
                found.append(batch)
                if len(found) >= limit:
                    break
        return tuple(found[:limit])

    def _unrecorded(self, batch: Batch) -> Batch | None:
        left = subtract(batch.samples, self._recorded.get(batch.samples[0].pass_number, ()))
        return Batch(left) if left else None

    def _free_lease(self, number: int) -> None:
        """End a lease; what is in no record is free, at its old place in the plan if that plan still stands."""
        held = self._leases.pop(number)
        left = self._unrecorded(held.batch)
        if left is None:
            return
        if held.index >= 0:
            self._plan.waiting[held.index] = left
        else:
            bisect.insort(self._free, left)

    def _new_batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield (number, batch) of the stream from the cursor on, without what is recorded already."""
        number = self._next_number
        while True:
            left = self._unrecorded(Batch((self.stream.range_of(number),)))
            if left is not None:
                yield number, left
            number += 1

    def _number_next(self) -> None:
        """Give the next number of the plan to the next batch."""
        plan = self._plan
        if plan.freed:
            batch = plan.freed.popleft()
        else:
            number, batch = next(self._new_batches())
            self._next_number = number + 1
        plan.waiting[plan.numbered] = batch
        plan.numbered += 1

    def _index_for(self, slot: int, step: int) -> int | None:
        """Return the number of the slot's batch for `step`, else of the first that this slot has not been given.

        The second case is a trainer that does not know which steps a predecessor has done.
        """
        plan = self._plan
        steps = chain((step,), () if plan.resumed else range(plan.inner_steps))
        for index in (wanted * plan.num_slots + slot for wanted in steps):
            while plan.numbered <= index:
                self._number_next()
            if index in plan.waiting:
                return index
        return None

    def _first_index(self) -> int:
        """Return the lowest number that is not leased; what became free since the plan was made comes first."""
        plan = self._plan
        if self._free:
            plan.freed.extendleft(reversed(self._free))
            self._free = []
        if not plan.waiting or plan.freed:
            self._number_next()
        return min(plan.waiting, key=lambda index: (plan.waiting[index], index))
