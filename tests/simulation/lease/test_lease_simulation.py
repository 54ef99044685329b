"""Seeded schedules: trainers that crash at any point, lost notes, late acknowledgements, records without some steps.

The truth is kept apart from the table: `committed` is what the replicas hold, and a record may only contain that. What
must hold, whatever the schedule: no sample is in two records or twice in one, and every pass completes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shoal.ids import StepKey
from shoal.swarm.lease import Denial, LeaseTable
from shoal.swarm.sample_ranges import BatchStream, Ranges, count, merge
from shoal.wire.messages.base import SampleRange

INNER_STEPS = 3
ROUNDS_WITH_FAULTS = 12


@dataclass
class Trainer:
    slot: int
    incarnation: int = 1
    alive: bool = True
    step: int = 0
    number: int = 0
    lease: int | None = None
    samples: Ranges = ()
    key: StepKey | None = None
    opened: bool = False
    committed: bool = False


@dataclass
class World:
    """One table, its trainers, and what the replicas have committed in the round."""

    rng: random.Random
    table: LeaseTable
    num_slots: int
    faults: bool = True
    round: int = 0
    trainers: dict[int, Trainer] = field(default_factory=dict[int, Trainer])
    committed: dict[StepKey, Ranges] = field(default_factory=dict[StepKey, Ranges])
    late: list[int] = field(default_factory=list[int])
    recorded: list[SampleRange] = field(default_factory=list[SampleRange])

    def chance(self, share: float) -> bool:
        return self.faults and self.rng.random() < share

    def play_round(self) -> None:
        self.round += 1
        self.committed.clear()
        self.table.plan_round(self.round, self.num_slots, INNER_STEPS)
        for slot in range(self.num_slots):
            trainer = self.trainers.setdefault(slot, Trainer(slot))
            trainer.step, trainer.lease, trainer.key = 0, None, None
        for _ in range(self.rng.randrange(400) if self.faults else 10_000):
            busy = [trainer for trainer in self.trainers.values() if trainer.step < INNER_STEPS]
            if not busy:
                break
            self.advance(self.rng.choice(busy))
        self.end_round()

    def advance(self, trainer: Trainer) -> None:
        """Let one thing happen to a trainer."""
        if not trainer.alive:
            self.restart(trainer)
        elif self.chance(0.05):
            trainer.alive = False
        elif trainer.lease is None:
            answer = self.table.lease(trainer.slot, trainer.incarnation, self.round, trainer.step)
            if isinstance(answer, Denial):
                trainer.step = INNER_STEPS
                return
            trainer.lease, trainer.samples = answer.lease, answer.batch.samples
            trainer.key, trainer.opened, trainer.committed = None, False, False
        elif trainer.key is None:
            if self.chance(0.05):
                self.table.give_back(trainer.lease)
                trainer.lease = None
                return
            trainer.key = StepKey(trainer.slot, trainer.incarnation, trainer.number, 0)
            if self.chance(0.03):
                # The trainer dies with the note in its queue although its Open is under way.
                self.commit(trainer)
                trainer.alive = False
                return
            self.table.note(trainer.lease, trainer.key)
        elif not trainer.committed:
            if self.chance(0.2):
                attempt = trainer.key.attempt + 1
                trainer.key = trainer.key._replace(attempt=attempt)
                self.table.note(trainer.lease, trainer.key)
            else:
                self.commit(trainer)
        elif self.chance(0.1):
            self.late.append(trainer.lease)
            self.finish(trainer)
        else:
            self.table.acknowledge(trainer.lease, committed=True)
            self.finish(trainer)

    def commit(self, trainer: Trainer) -> None:
        assert trainer.key is not None
        self.committed[trainer.key] = trainer.samples
        trainer.committed = True

    def finish(self, trainer: Trainer) -> None:
        trainer.lease, trainer.key = None, None
        trainer.step += 1
        trainer.number += 1

    def restart(self, trainer: Trainer) -> None:
        """The client fences the dead trainer, settles its steps at the replicas, and starts another one in its slot."""
        theirs = tuple(key for key in self.committed if key[:2] == (trainer.slot, trainer.incarnation))
        self.table.release_trainer(trainer.slot, trainer.incarnation, theirs)
        if self.rng.random() < 0.3:
            self.table.release_trainer(trainer.slot, trainer.incarnation, theirs)
        stale = self.table.lease(trainer.slot, trainer.incarnation, self.round, 0)
        assert isinstance(stale, Denial)
        self.trainers[trainer.slot] = Trainer(trainer.slot, trainer.incarnation + 1)

    def end_round(self) -> None:
        """Decide a record: what is committed, without the steps that only dead replicas held."""
        kept = [samples for samples in self.committed.values() if not self.chance(0.1)]
        record = tuple(item for samples in kept for item in samples)
        self.table.record(self.round, merge(record) if self.rng.random() < 0.5 else record)
        self.recorded += record
        for lease in self.late:
            self.table.acknowledge(lease, committed=True)
        self.late.clear()
        assert self.table.leased == {}
        if self.chance(0.2):
            self.num_slots = self.rng.randint(1, 3)
            self.trainers = {slot: t for slot, t in self.trainers.items() if slot < self.num_slots}


def play(seed: int) -> World:
    rng = random.Random(seed)
    stream = BatchStream(rng.randint(1, 60), rng.randint(1, 8))
    world = World(rng, LeaseTable(stream, deterministic=rng.random() < 0.5), num_slots=rng.randint(1, 3))
    while world.round < ROUNDS_WITH_FAULTS:
        world.play_round()
    # A trainer that is still dead was never fenced in the run; from here on the run is undisturbed.
    world.faults = False
    last_pass = max((item.pass_number for item in world.recorded), default=0)
    while count(item for item in world.table.recorded if item.pass_number <= last_pass) < (
        stream.num_samples * (last_pass + 1)
    ):
        world.play_round()
        assert world.round < 500, "the passes do not complete"
    assert count(world.recorded) == count(merge(world.recorded)), "a sample was recorded twice"
    assert world.table.recorded == merge(world.recorded)
    for pass_number in range(last_pass + 1):
        assert SampleRange(pass_number, 0, stream.num_samples) in world.table.recorded
    return world


@pytest.mark.parametrize("block", range(8))
def test_every_sample_is_recorded_exactly_once_per_pass_in_any_schedule(block: int) -> None:
    for seed in range(block * 300, (block + 1) * 300):
        play(seed)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_undisturbed_deterministic_rounds_give_the_same_batches_in_any_order_of_requests(num_slots: int) -> None:
    def batches(seed: int) -> dict[tuple[int, int, int], Ranges]:
        rng = random.Random(seed)
        table = LeaseTable(BatchStream(23, 4), deterministic=True)
        got: dict[tuple[int, int, int], Ranges] = {}
        for round_number in range(1, 8):
            table.plan_round(round_number, num_slots, INNER_STEPS)
            asked = {slot: 0 for slot in range(num_slots)}
            while asked:
                slot = rng.choice(list(asked))
                answer = table.lease(slot, 1, round_number, asked[slot])
                assert not isinstance(answer, Denial)
                got[round_number, slot, asked[slot]] = answer.batch.samples
                asked[slot] += 1
                if asked[slot] == INNER_STEPS:
                    del asked[slot]
            table.record(round_number, tuple(item for held in table.leased.values() for item in held.samples))
        return got

    first = batches(0)
    assert all(batches(seed) == first for seed in range(1, 20))
    # Nothing is lost between rounds: the stream without gaps, in the order of (round, step, slot).
    order = sorted(first, key=lambda at: (at[0], at[2], at[1]))
    stream = BatchStream(23, 4)
    assert [first[at] for at in order] == [(stream.range_of(number),) for number in range(len(order))]
