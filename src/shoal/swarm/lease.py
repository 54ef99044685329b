"""Who trains on which samples: every sample of a pass goes to exactly one committed step. Pure state, no I/O.

    free --lease--> leased --acknowledge--> done --record--> recorded
      ^               |                      |
      +-- given back, released, or in no record of its round

The unit is a batch: ranges of the shuffled order of one pass. A sample is free until it is leased. Only the record of
a round makes it recorded; what was leased in that round and is not in the record becomes free, and what is free is
handed out before anything new. The lease of a trainer that has died moves only when it is proven that no replica has
committed its batch, or will (`release_trainer`), or when a record without it is committed. One that its trainer has
left to the record stays for it, whoever dies.

A user may pause the run: nothing is leased then. All else goes on: what is leased is trained, acknowledged, recorded.

Which batch a step gets is a `Deal`'s to say: in a deterministic run slot and step alone decide (`swarm.fixed_deal`),
otherwise faster trainers get larger batches (`swarm.shared_deal`).

Source: docs/protocol.md, "The feed".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.errors import RemoteProtocolError
from shoal.ids import StepKey
from shoal.swarm.deal import NO_PLACE, Deal
from shoal.swarm.fixed_deal import FixedDeal
from shoal.swarm.sample_ranges import Batch, BatchStream, Ranges, RecordedSamples
from shoal.swarm.shared_deal import SharedDeal
from shoal.swarm.takeover import Path, Settled
from shoal.wire.messages.base import StepRange

MAX_PLANNED_BATCHES = 10_000_000
"""A round plan with more steps than this over all slots is refused as nonsense."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease was given: `lease` names it in later calls."""

    lease: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Denial:
    """No lease, and why; the reason is shown to people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Later:
    """No lease as long as the run is paused: to be asked for again when it goes on."""


@dataclass(frozen=True, slots=True)
class Release:
    """What has become of the leases of a trainer that is gone.

    Attributes:
        leases: all of them, whether free now or not; their bytes are no longer used.
        next_step: number of the first step of the slot in this round that none of the leases holds.
        is_known: the table knows all leases of the round; False: there may be more.
    """

    leases: tuple[int, ...]
    next_step: int
    is_known: bool


@dataclass(slots=True)
class _Lease:
    trainer: int
    generation: int
    round: int
    index: int
    """Of the batch within the round's plan."""
    batch: Batch
    attempts: dict[StepKey, Path] = field(default_factory=dict[StepKey, Path])
    done: bool = False
    left: bool = False
    """Its trainer could not say whether it is trained: the record will."""


_NO_STEPS = StepRange(0, 0)


@dataclass(slots=True)
class _PlannedRound:
    """A round. `is_partial`: what dead trainers have leased in it is not known; `closed`: so nothing more is leased."""

    round: int = 0
    num_slots: int = 0
    steps: StepRange = _NO_STEPS
    is_partial: bool = False
    closed: bool = False


class LeaseTable:
    """The state of every sample. All methods are total: a call that makes no sense changes nothing or is denied."""

    def __init__(self, stream: BatchStream, *, deterministic: bool, max_samples: int | None = None) -> None:
        """Start with every sample free and no round planned.

        Args:
            stream: holds the samples, and the batches of a deterministic run.
            deterministic: slot and step alone decide which batch a step gets; speeds do not count.
            max_samples: of a batch in other runs, at least the stream's batch; None: any number.
        """
        self.stream = stream
        self._deterministic = deterministic
        self._max_samples = max_samples
        self._chain = ""
        self._num_grants = 0
        self._begin()
        self._lowest_generation: dict[int, int] = {}
        self._is_paused = False

    def _begin(self) -> None:
        """Every sample is free, and no round is planned."""
        stream, self._recorded = self.stream, RecordedSamples()
        self._deal: Deal = (
            FixedDeal(stream, self._recorded) if self._deterministic else SharedDeal(stream, self._max_samples)
        )
        self._plan = _PlannedRound()
        self._leases: dict[int, _Lease] = {}

    @property
    def planned_round(self) -> int:
        """The latest round that was planned; 0 before the first."""
        return self._plan.round

    @property
    def recorded(self) -> Ranges:
        """Every sample that a round record contains, merged."""
        return self._recorded.samples

    @property
    def free(self) -> tuple[Batch, ...]:
        """The batches that were cut from the stream and are nobody's now, in the order of the data."""
        return self._deal.free

    def plan_round(self, round_number: int, num_slots: int, steps: StepRange, speeds: tuple[float, ...] = ()) -> None:
        """Open a round; what earlier plans did not hand out comes first. Repeating the same plan changes nothing.

        A second plan for the same round replaces the first for what is not leased yet; one of an earlier round is
        ignored.

        Args:
            round_number: 1-based.
            speeds: samples per second of each slot, measured before the round; 0 or empty: not known.

        Raises:
            RemoteProtocolError: a size is not positive, the plan is absurdly large, or the speeds make no sense.
        """
        self._open(round_number, num_slots, steps, speeds, is_resumed=False)

    def pause(self) -> None:
        """Lease nothing, until `go_on`."""
        self._is_paused = True

    def go_on(self) -> None:
        """The run is not paused, or not any more."""
        self._is_paused = False

    def lease(
        self, trainer: int, generation: int, round_number: int, step: int, now_s: float = 0.0
    ) -> Grant | Later | Denial:
        """Give trainer (slot) `trainer` the batch of the step with this number, if there is one for it.

        `now_s`, on any one clock, is of interest where shares follow speed.
        """
        plan = self._plan
        if round_number != plan.round:
            return Denial(f"round {round_number} is not open: the planned round is {plan.round}")
        if step not in plan.steps.numbers or not 0 <= trainer < plan.num_slots:
            return Denial(
                f"step {step} of slot {trainer} is outside the plan of round {plan.round}: "
                f"{plan.num_slots} slots, steps {plan.steps.first} to {plan.steps.stop - 1}"
            )
        if plan.closed:
            return Denial(f"round {plan.round} ends here: it is not known what else was leased in it")
        if generation < self._lowest_generation.get(trainer, 0):
            return Denial(f"generation {generation} of trainer {trainer} is stale: a later one has taken its place")
        self._lowest_generation[trainer] = generation
        if self._is_paused:
            return Later()
        dealt = self._deal.deal(trainer, step - plan.steps.first, now_s)
        if dealt is None:
            return Denial(f"every batch of slot {trainer} in round {plan.round} has been handed out")
        index, batch = dealt
        self._num_grants += 1
        self._leases[self._num_grants] = _Lease(trainer, generation, round_number, index, batch)
        return Grant(self._num_grants, batch)

    def resume_round(
        self,
        round_number: int,
        num_slots: int,
        steps: StepRange,
        speeds: tuple[float, ...] = (),
        *,
        complete: bool,
    ) -> None:
        """Open a round in whose middle this table begins anew; `resume` then tells what its trainers have leased.

        The records so far have to be known, then a deterministic run's batches have the numbers that they had. Without
        `complete`, others have leased batches too. In a deterministic run those are told by slot and step, which nobody
        asks for again; otherwise nothing more is leased in this round.

        Raises:
            RemoteProtocolError: as `plan_round`.
        """
        self._open(round_number, num_slots, steps, speeds, is_resumed=True)
        if not complete:
            self.forgo()

    def resume(
        self,
        trainer: int,
        generation: int,
        samples: Ranges,
        attempts: Mapping[StepKey, Path],
        *,
        done: bool,
        left: bool = False,
    ) -> int | None:
        """Take over a lease of the resumed round; returns None, and leases nothing more, if there is no such batch."""
        plan = self._plan
        index = self._deal.claim(samples)
        if index is None:
            plan.closed = True
            return None
        self._num_grants += 1
        self._leases[self._num_grants] = _Lease(
            trainer, generation, plan.round, index, Batch(samples), dict(attempts), done, left
        )
        return self._num_grants

    def forgo(self) -> None:
        """A trainer of the resumed round has died and took with it what it had leased; see `resume_round`."""
        self._plan.is_partial = True
        self._plan.closed = self._plan.closed or not self._deterministic

    def begun(self, lease: int, now_s: float) -> None:
        """The leased batch has got to its trainer; `now_s` as for `lease`."""
        held = self._leases.get(lease)
        if held is not None and held.index != NO_PLACE:
            self._deal.begun(held.index, now_s)

    def note(self, lease: int, key: StepKey, path: Path) -> None:
        """Remember that attempt `key` trains on the leased batch; told before any replica hears of the attempt."""
        held = self._leases.get(lease)
        if held is not None and key[:2] == (held.trainer, held.generation):
            held.attempts[key] = path

    def acknowledge(self, lease: int, *, committed: bool, now_s: float = 0.0) -> None:
        """The trainer is through with the lease: done, or (`committed` false) left to the round's record."""
        held = self._leases.get(lease)
        if held is None:
            return
        if not committed:
            held.left = True
            return
        held.done = True
        if held.index != NO_PLACE:
            self._deal.trained(held.index, now_s)

    def give_back(self, lease: int) -> bool:
        """Free an unused lease; returns False if an attempt was noted: then its fate is left to the round's record."""
        held = self._leases.get(lease)
        if held is None or held.done:
            return False
        if held.attempts:
            held.left = True
            return False
        self._free_lease(lease)
        return True

    def release_trainer(self, trainer: int, generation: int, settled: Settled) -> Release:
        """Settle all leases of this generation of `trainer`, and refuse it and earlier ones from now on.

        Leases with a kept attempt are done. Free are those of the settled round whose attempts are all denied. A lease
        that was left to the record stays for it, and so does one without a note if its note may have died with the
        trainer: if an attempt is kept that no lease has noted, or if somebody has not answered who may know of one.
        """
        self._lowest_generation[trainer] = max(self._lowest_generation.get(trainer, 0), generation + 1)
        # Of exactly this generation: nothing is said about leases of an earlier one that wait for the record.
        theirs = [n for n, held in self._leases.items() if (held.trainer, held.generation) == (trainer, generation)]
        noted = {key for number in theirs for key in self._leases[number].attempts}
        has_all_notes = settled.complete and all(key in noted for key in settled.kept if key.generation == generation)
        for number in theirs:
            held = self._leases[number]
            held.done |= not settled.kept.isdisjoint(held.attempts)
            if held.round == settled.round and self._is_untrained(held, settled, has_all_notes):
                self._free_lease(number)
        return Release(tuple(theirs), self._next_step(trainer), not self._plan.is_partial)

    def _is_untrained(self, held: _Lease, settled: Settled, has_all_notes: bool) -> bool:
        if held.done or held.left:
            return False
        if not held.attempts:
            return has_all_notes
        return all(settled.denies(key, path) for key, path in held.attempts.items())

    def _next_step(self, slot: int) -> int:
        num_slots = max(1, self._plan.num_slots)
        places = [divmod(held.index, num_slots) for held in self._leases.values() if held.index != NO_PLACE]
        return self._plan.steps.first + max((step + 1 for step, of_slot in places if of_slot == slot), default=0)

    def record(self, round_number: int, samples: Ranges, chain: str = "") -> tuple[int, ...]:
        """D_`round_number` is committed with `samples`, also of skipped steps. All else leased up to it is free.

        If `chain` differs from the one before, `samples` are all that is used: what was recorded, leased or planned on
        the old chain no longer counts.

        Returns:
            The leases that ended.

        Raises:
            RemoteProtocolError: a range lies outside the data.
        """
        strange = [item for item in samples if not self.stream.contains(item)]
        if strange:
            raise RemoteProtocolError(f"record {round_number} names {strange[0]}; a pass has {self.stream.num_samples}")
        if chain != self._chain:
            self._chain = chain
            ended = tuple(self._leases)
            self._begin()
            self._recorded.add(samples)
            self._deal.recorded(samples)
            return ended
        self._recorded.add(samples)
        ended = [number for number, held in self._leases.items() if held.round <= round_number]
        for number in ended:
            self._free_lease(number)
        # A batch that was free already may be in the record all the same, e.g. in the first records after a restart.
        self._deal.recorded(samples)
        return tuple(ended)

    def upcoming(self, limit: int) -> tuple[Batch, ...]:
        """Return the next batches, at most `limit`, that trainers will be given if nothing goes wrong."""
        return self._deal.upcoming(limit)

    def _open(
        self, round_number: int, num_slots: int, steps: StepRange, speeds: tuple[float, ...], *, is_resumed: bool
    ) -> None:
        if num_slots < 1 or not steps or num_slots * len(steps) > MAX_PLANNED_BATCHES:
            raise RemoteProtocolError(f"a round of {num_slots} slots x {len(steps)} steps cannot be planned")
        if len(speeds) not in (0, num_slots) or not all(0 <= speed < math.inf for speed in speeds):
            raise RemoteProtocolError(f"a round of {num_slots} slots cannot be planned with the speeds {speeds}")
        plan = self._plan
        same = (plan.round, plan.num_slots, plan.steps) == (round_number, num_slots, steps)
        if round_number < plan.round or same:
            return
        for lease in self._leases.values():
            lease.index = NO_PLACE
        self._plan = _PlannedRound(round_number, num_slots, steps)
        self._deal.plan(num_slots, len(steps), speeds, is_resumed=is_resumed)

    def _free_lease(self, number: int) -> None:
        """End a lease; what is in no record is free."""
        held = self._leases.pop(number)
        left = self._recorded.left_of(held.batch)
        if left is not None:
            self._deal.put_back(held.index, left)
