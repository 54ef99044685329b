"""Seeded schedules: trainers that crash at any point, lost notes, late acknowledgements, records without some steps,
tables that begin anew in the middle of a round; trainers of any speed, so that batches have any size.

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
MAX_SLOTS = 3


@dataclass
class Held:
    """A lease as its trainer knows it; `lease` is another number after the table has begun anew."""

    lease: int
    samples: Ranges
    keys: list[StepKey] = field(default_factory=list[StepKey])
    done: bool = False


@dataclass
class Trainer:
    slot: int
    incarnation: int = 1
    alive: bool = True
    step: int = 0
    number: int = 0
    current: Held | None = None
    held: list[Held] = field(default_factory=list[Held])
    key: StepKey | None = None
    committed: bool = False


@dataclass
class World:
    """One table, its trainers, and what the replicas have committed in the round."""

    rng: random.Random
    stream: BatchStream
    deterministic: bool
    num_slots: int
    table: LeaseTable = field(init=False)
    faults: bool = True
    round: int = 0
    trainers: dict[int, Trainer] = field(default_factory=dict[int, Trainer])
    committed: dict[StepKey, Ranges] = field(default_factory=dict[StepKey, Ranges])
    late: list[Held] = field(default_factory=list[Held])
    recorded: list[SampleRange] = field(default_factory=list[SampleRange])
    now_s: float = 0.0
    was_replaced: bool = False

    def __post_init__(self) -> None:
        # Whether a new trainer is told at which step it begins. A deterministic table that begins anew relies on that.
        self.names_steps = self.rng.random() < 0.5
        self.speeds = [self.rng.choice((0.3, 1.0, 1.0, 4.0, 16.0)) for _ in range(MAX_SLOTS)]
        self.max_samples = self.stream.batch_samples * self.rng.randint(1, 4) if self.rng.random() < 0.3 else None
        self.table = self.new_table()

    def new_table(self) -> LeaseTable:
        return LeaseTable(self.stream, deterministic=self.deterministic, max_samples=self.max_samples)

    def chance(self, share: float) -> bool:
        return self.faults and self.rng.random() < share

    def play_round(self) -> None:
        self.round += 1
        self.committed.clear()
        known = tuple(self.rng.choice((0.0, speed)) for speed in self.speeds[: self.num_slots])
        self.table.plan_round(self.round, self.num_slots, INNER_STEPS, self.rng.choice(((), known)))
        self.was_replaced = False
        for slot in range(self.num_slots):
            trainer = self.trainers.setdefault(slot, Trainer(slot))
            trainer.step, trainer.current, trainer.key = 0, None, None
            trainer.held.clear()
        for _ in range(self.rng.randrange(400) if self.faults else 10_000):
            busy = [trainer for trainer in self.trainers.values() if trainer.step < INNER_STEPS]
            if not busy:
                break
            self.now_s += self.rng.expovariate(1.0)
            if self.chance(0.02) and (self.names_steps or not self.deterministic):
                self.begin_anew()
            self.advance(self.rng.choices(busy, [self.speeds[trainer.slot] for trainer in busy])[0])
        self.end_round()

    def advance(self, trainer: Trainer) -> None:
        """Let one thing happen to a trainer."""
        if not trainer.alive:
            self.restart(trainer)
        elif self.chance(0.05):
            trainer.alive = False
        elif (current := trainer.current) is None:
            answer = self.table.lease(trainer.slot, trainer.incarnation, self.round, trainer.step, self.now_s)
            if isinstance(answer, Denial):
                trainer.step = INNER_STEPS
                return
            if not self.deterministic and self.max_samples is not None:
                assert answer.batch.num_samples <= self.max_samples
            self.table.begun(answer.lease, self.now_s)
            trainer.current = Held(answer.lease, answer.batch.samples)
            trainer.held.append(trainer.current)
            trainer.key, trainer.committed = None, False
        elif trainer.key is None:
            if self.chance(0.05):
                self.table.give_back(current.lease)
                trainer.held.remove(current)
                trainer.current = None
                return
            trainer.key = StepKey(trainer.slot, trainer.incarnation, trainer.number, 0)
            if self.chance(0.03):
                # The trainer dies with the note in its queue although its Open is under way.
                self.commit(trainer)
                trainer.alive = False
                return
            self.note(current, trainer.key)
        elif not trainer.committed:
            if self.chance(0.2):
                attempt = trainer.key.attempt + 1
                trainer.key = trainer.key._replace(attempt=attempt)
                self.note(current, trainer.key)
            else:
                self.commit(trainer)
        elif self.chance(0.1):
            self.late.append(current)
            self.finish(trainer)
        else:
            self.table.acknowledge(current.lease, committed=True, now_s=self.now_s)
            current.done = True
            self.finish(trainer)

    def note(self, held: Held, key: StepKey) -> None:
        held.keys.append(key)
        self.table.note(held.lease, key)

    def commit(self, trainer: Trainer) -> None:
        assert trainer.key is not None
        assert trainer.current is not None
        self.committed[trainer.key] = trainer.current.samples
        trainer.committed = True

    def finish(self, trainer: Trainer) -> None:
        trainer.current, trainer.key = None, None
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
        self.was_replaced = True
        # Where it is not known whether there was one step more, that one is left out.
        done = trainer.step + (trainer.current is not None and trainer.committed) + self.chance(0.2)
        step = done if self.names_steps else 0
        self.trainers[trainer.slot] = Trainer(trainer.slot, trainer.incarnation + 1, step=step)

    def begin_anew(self) -> None:
        """The data server is started again: it learns of records from the client, of leases from living trainers."""
        self.table = self.new_table()
        if self.recorded:
            self.table.record(self.round - 1, merge(self.recorded))
        dead = {trainer.slot for trainer in self.trainers.values() if not trainer.alive}
        complete = not dead and not self.was_replaced
        self.table.resume_round(self.round, self.num_slots, INNER_STEPS, complete=complete)
        for trainer in self.trainers.values():
            if trainer.alive and self.chance(0.1):
                trainer.alive = False  # before it has said what it has
                self.table.forgo()
            for held in trainer.held if trainer.alive else ():
                lease = self.table.resume(
                    trainer.slot, trainer.incarnation, held.samples, tuple(held.keys), done=held.done
                )
                assert lease is not None, "what a trainer says to have is free"
                held.lease = lease

    def end_round(self) -> None:
        """Decide a record: what is committed, without the steps that only dead replicas held."""
        kept = [samples for samples in self.committed.values() if not self.chance(0.1)]
        record = tuple(item for samples in kept for item in samples)
        self.table.record(self.round, merge(record) if self.rng.random() < 0.5 else record)
        self.recorded += record
        for held in self.late:
            self.table.acknowledge(held.lease, committed=True, now_s=self.now_s)
        self.late.clear()
        assert self.table.leased == {}
        if self.chance(0.2):
            self.num_slots = self.rng.randint(1, MAX_SLOTS)
            self.trainers = {slot: t for slot, t in self.trainers.items() if slot < self.num_slots}


def play(seed: int) -> World:
    rng = random.Random(seed)
    stream = BatchStream(rng.randint(1, 60), rng.randint(1, 8))
    world = World(rng, stream, rng.random() < 0.5, num_slots=rng.randint(1, MAX_SLOTS))
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
