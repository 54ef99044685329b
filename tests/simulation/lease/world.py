"""Leases under faults: trainers that crash at any point, or freeze and come back after another has taken their place,
lost notes, late acknowledgements, steps that are left to the record, records without some steps, tables that begin anew
in the middle of a round; trainers of any speed, so that batches have any size. Replicas may be cut off when a trainer
dies, or have been started again: what is then asked of the others is settled by `TakeoverMachine`. A user pauses the
run at any time, and `RoundBoundary` says when its rounds end.

The truth is kept apart from the table: `committed` is what the replicas hold, and a record may only contain that. What
must hold, whatever the schedule: nothing is leased to two at a time or leased though it is recorded, no sample is in
two records or twice in one, and every pass completes. In a pause nothing is leased and no round ends, and a round that
ends before its trainers are done has had all of its time without its pauses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken, SampleSafety
from tests.windows import leased

from shoal.ids import PeerId, StepKey
from shoal.swarm.lease import Denial, Later, LeaseTable
from shoal.swarm.round_boundary import RoundBoundary, RunTime
from shoal.swarm.sample_ranges import BatchStream, Ranges, count, merge, subtract
from shoal.swarm.takeover import Path, Settled, TakeoverMachine, next_number
from shoal.wire.messages.base import SampleRange, StepRange
from shoal.wire.messages.step import Fenced

INNER_STEPS = 3
ROUNDS_WITH_FAULTS = 12
MAX_SLOTS = 3
REPLICAS = tuple(PeerId(name) for name in "abc")
UNHURRIED_S = 1e6
ROUNDING_S = 1e-6


@dataclass
class Held:
    """A lease as its trainer knows it; `lease` is another number after the table has begun anew."""

    lease: int
    samples: Ranges
    attempts: dict[StepKey, Path] = field(default_factory=dict[StepKey, Path])
    done: bool = False
    left: bool = False


@dataclass
class Trainer:
    slot: int
    generation: int = 1
    alive: bool = True
    step: int = 0
    reported: int = -1
    current: Held | None = None
    held: list[Held] = field(default_factory=list[Held])
    key: StepKey | None = None
    committed: bool = False


class World:
    """One table, its trainers, and what the replicas have committed in the round."""

    def __init__(
        self,
        seed: int,
        table_class: type[LeaseTable] = LeaseTable,
        takeover_class: type[TakeoverMachine] = TakeoverMachine,
        boundary_class: type[RoundBoundary] = RoundBoundary,
        time_class: type[RunTime] = RunTime,
    ) -> None:
        self.network = Kernel(seed)
        self.rng = rng = self.network.rng
        self.table_class = table_class
        self.stream = BatchStream(rng.randint(1, 60), rng.randint(1, 8))
        self.deterministic = rng.random() < 0.5
        self.num_slots = rng.randint(1, MAX_SLOTS)
        self.faults = True
        self.round = 0
        self.trainers: dict[int, Trainer] = {}
        self.zombies: list[Trainer] = []
        self.committed: dict[StepKey, Ranges] = {}
        self.paths: dict[StepKey, Path] = {}
        # Since when each replica has lived, counted in attempts, and when each attempt was opened.
        self.began: dict[PeerId, int] = dict.fromkeys(REPLICAS, 0)
        self.opened: dict[StepKey, int] = {}
        self.takeover_class, self.boundary_class = takeover_class, boundary_class
        self.time = time_class()
        # What is true of pauses, apart from what the machines make of it.
        self.paused_at_s: float | None = None
        self.stood_s = 0.0
        self.waiting: list[int] = []
        self.late: list[Held] = []
        self.recorded: list[SampleRange] = []
        self.samples = SampleSafety()
        self.was_replaced = False
        # Whether a new trainer is told at which step it begins. A deterministic table that begins anew relies on that.
        self.names_steps = rng.random() < 0.5
        self.speeds = [rng.choice((0.3, 1.0, 1.0, 4.0, 16.0)) for _ in range(MAX_SLOTS)]
        self.max_samples = self.stream.batch_samples * rng.randint(1, 4) if rng.random() < 0.3 else None
        self.table = self.new_table()

    @property
    def now_s(self) -> float:
        return self.network.now_s

    def new_table(self) -> LeaseTable:
        return self.table_class(self.stream, deterministic=self.deterministic, max_samples=self.max_samples)

    def chance(self, share: float) -> bool:
        return self.faults and self.rng.random() < share

    def run(self) -> None:
        """Some rounds with faults, then as many as it takes to complete the passes that have begun.

        Raises:
            Broken: Something does not hold.
        """
        while self.round < ROUNDS_WITH_FAULTS:
            self.play_round()
        # A trainer that is still dead was never fenced in the run; from here on the run is undisturbed.
        self.faults = False
        self.zombies.clear()
        last_pass = max((item.pass_number for item in self.recorded), default=0)
        expected = self.stream.num_samples * (last_pass + 1)
        while count(item for item in self.table.recorded if item.pass_number <= last_pass) < expected:
            self.play_round()
            if self.round > 500:
                recorded = [item for item in self.table.recorded if item.pass_number <= last_pass]
                liveness.all_recorded(range(count(recorded)), expected, [str(recorded)])
        if self.table.recorded != merge(self.recorded):
            raise Broken("the table does not know what is recorded")

    def play_round(self) -> None:
        self.round += 1
        self.steps = StepRange((self.round - 1) * INNER_STEPS, self.round * INNER_STEPS)
        self.committed.clear()
        self.paths.clear()
        self.opened.clear()
        self.began = dict.fromkeys(REPLICAS, 0)
        known = tuple(self.rng.choice((0.0, speed)) for speed in self.speeds[: self.num_slots])
        self.table.plan_round(self.round, self.num_slots, self.steps, self.rng.choice(((), known)))
        self.was_replaced = False
        timeout_s = self.rng.choice((4.0, 40.0, 400.0)) * self.rng.random() if self.faults else UNHURRIED_S
        self.begun_s, self.stood_s, self.timeout_s = self.now_s, 0.0, timeout_s
        if self.chance(0.1):
            self.pause()
        self.boundary = self.boundary_class(self.time, timeout_s, self.now_s)
        self.network.after(self.boundary.left_s(self.now_s), self.look)
        for slot in range(self.num_slots):
            trainer = self.trainers.setdefault(slot, Trainer(slot))
            trainer.step, trainer.current, trainer.key = 0, None, None
            trainer.held.clear()
            self.network.after(self.network.exponential(1 / self.speeds[slot]), self.go_on, slot, self.round)
        # The record may be committed before everybody has done everything.
        self.network.run(self.now_s + 2 * UNHURRIED_S, self.is_over)
        self.check_boundary()
        self.end_round()

    def is_over(self) -> bool:
        return self.boundary.is_over(self.now_s, all_done=self.is_done(), is_stuck=False)

    def look(self) -> None:
        """Whatever happens makes the client look whether the round is over; so does the time at which it wants to."""

    def check_boundary(self) -> None:
        """The round that ends has had its time."""
        if self.paused_at_s is not None:
            raise Broken(f"round {self.round} ends in a pause")
        had_s = self.now_s - self.begun_s - self.stood_s
        if not self.is_done() and had_s < self.timeout_s - ROUNDING_S:
            raise Broken(f"round {self.round} ends after {had_s} s without its pauses, and may take {self.timeout_s}")

    def pause(self) -> None:
        """A user pauses the run, perhaps once more."""
        self.time.pause(self.now_s)
        self.table.pause()
        if self.paused_at_s is None:
            self.paused_at_s = self.now_s
            self.network.after(self.network.exponential(self.rng.choice((1.0, 10.0, 100.0))), self.resume)

    def resume(self) -> None:
        """The user lets it go on; the round that is paused has as much time left as it had."""
        if self.paused_at_s is None:
            raise Broken("nobody has paused the run")
        self.time.resume(self.now_s)
        self.table.go_on()
        self.stood_s += self.now_s - max(self.paused_at_s, self.begun_s)
        self.paused_at_s = None
        waiting, self.waiting = self.waiting, []
        for slot in waiting:
            self.go_on(slot, self.round)
        self.network.after(self.boundary.left_s(self.now_s), self.look)

    def is_done(self) -> bool:
        return all(trainer.step >= INNER_STEPS for trainer in self.trainers.values())

    def go_on(self, slot: int, round: int) -> None:
        """The next event of a slot's trainer."""
        trainer = self.trainers.get(slot)
        if round != self.round or trainer is None or trainer.step >= INNER_STEPS:
            return
        if self.chance(0.02) and (self.names_steps or not self.deterministic):
            self.begin_anew()
        if self.chance(0.02):
            self.pause()
        self.advance(trainer)
        self.check_leases()
        if slot in self.waiting:
            return
        self.network.after(self.network.exponential(1 / self.speeds[slot]), self.go_on, slot, round)

    def check_leases(self) -> None:
        """Nothing is leased to two at a time, or though it is recorded."""
        held = [item for batch in leased(self.table).values() for item in batch.samples]
        if count(held) != count(merge(held)):
            raise Broken(f"leased twice: {leased(self.table)}")
        if subtract(merge(held), self.table.recorded) != merge(held):
            raise Broken(f"leased though it is recorded: {leased(self.table)}")

    def advance(self, trainer: Trainer) -> None:
        """Let one thing happen to a trainer."""
        if not trainer.alive:
            self.restart(trainer)
        elif self.chance(0.05):
            trainer.alive = False
        elif (current := trainer.current) is None:
            answer = self.table.lease(
                trainer.slot, trainer.generation, self.round, self.steps.first + trainer.step, self.now_s
            )
            if isinstance(answer, Denial):
                trainer.step = INNER_STEPS
                return
            if isinstance(answer, Later) != (self.paused_at_s is not None):
                raise Broken(f"trainer {trainer.slot} is told {answer}, paused at {self.paused_at_s}")
            if isinstance(answer, Later):
                self.waiting.append(trainer.slot)
                return
            most = None if self.deterministic else self.max_samples
            if most is not None and answer.batch.num_samples > most:
                raise Broken(f"a batch of {answer.batch.num_samples} samples, at most {most} are allowed")
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
            number = self.steps.first + trainer.step
            self.attempt(trainer, StepKey(trainer.slot, trainer.generation, number, 0))
            if self.chance(0.03):
                # The trainer dies with the note in its queue although its Open is under way.
                self.commit(trainer)
                trainer.alive = False
                return
            self.note(current, trainer.key)
        elif not trainer.committed:
            if self.chance(0.2):
                self.note(current, self.attempt(trainer, trainer.key._replace(attempt=trainer.key.attempt + 1)))
            else:
                self.commit(trainer)
        elif self.chance(0.1):
            self.late.append(current)
            self.finish(trainer)
        elif self.chance(0.1):
            # All of the path were lost before they had answered.
            self.table.acknowledge(current.lease, committed=False, now_s=self.now_s)
            current.left = True
            self.finish(trainer)
        else:
            self.table.acknowledge(current.lease, committed=True, now_s=self.now_s)
            current.done = True
            trainer.reported = trainer.key.number
            self.finish(trainer)

    def attempt(self, trainer: Trainer, key: StepKey) -> StepKey:
        """A trainer begins an attempt over two replicas of three; now and then one was started again just before."""
        if self.chance(0.1):
            self.restart_replica(self.rng.choice(REPLICAS))
        trainer.key = key
        self.opened[key] = len(self.opened) + 1
        self.paths[key] = tuple(self.rng.sample(REPLICAS, 2))
        return key

    def restart_replica(self, replica: PeerId) -> None:
        """It forgets everything; what nobody else of the path has is committed no more."""
        self.began[replica] = len(self.opened)
        self.committed = {
            key: samples
            for key, samples in self.committed.items()
            if any(self.lives_since(peer, key) for peer in self.paths[key])
        }

    def lives_since(self, replica: PeerId, key: StepKey) -> bool:
        return replica in self.paths[key] and self.began[replica] < self.opened[key]

    def settle(self, trainer: Trainer) -> Settled:
        """Ask the replicas that can be reached now what a trainer has done."""
        slot, generation = trainer.slot, trainer.generation
        cut = self.rng.sample(REPLICAS, self.rng.choice((0, 1, 2))) if self.chance(0.3) else ()
        machine = self.takeover_class(slot, generation + 1, self.round, self.now_s)
        for replica in set(REPLICAS) - set(cut):
            known = [key for key in self.opened if key[:2] == (slot, generation) and self.lives_since(replica, key)]
            # One that has not applied it has prepared it, and waits for somebody who can tell.
            committed = [key for key in known if key in self.committed and self.rng.random() < 0.7]
            in_doubt = [key for key in known if key in self.committed and key not in committed]
            since = {slot: min(known)} if known else {}
            fence = {slot: generation + 1}
            answer = Fenced(fence, tuple(committed), tuple(in_doubt), self.round, since, self.began[replica] == 0)
            machine.receive(replica, answer)
        steady = [replica for replica in REPLICAS if self.began[replica] == 0 and self.rng.random() < 0.5]
        return machine.settled(REPLICAS, steady)

    def note(self, held: Held, key: StepKey) -> None:
        held.attempts[key] = self.paths[key]
        self.table.note(held.lease, key, self.paths[key])

    def commit(self, trainer: Trainer) -> None:
        if trainer.key is None or trainer.current is None:
            raise Broken(f"trainer {trainer.slot} commits nothing")
        self.committed[trainer.key] = trainer.current.samples
        trainer.committed = True

    def finish(self, trainer: Trainer) -> None:
        trainer.current, trainer.key = None, None
        trainer.step += 1

    def restart(self, trainer: Trainer) -> None:
        """The client fences the dead trainer, settles its steps at the replicas, and starts another one in its slot."""
        settled = self.settle(trainer)
        released = self.table.release_trainer(trainer.slot, trainer.generation, settled)
        if self.rng.random() < 0.3:
            self.table.release_trainer(trainer.slot, trainer.generation, settled)
        if not isinstance(self.table.lease(trainer.slot, trainer.generation, self.round, self.steps.first), Denial):
            raise Broken(f"generation {trainer.generation} of trainer {trainer.slot} gets a lease though it was fenced")
        if self.rng.random() < 0.5:
            self.zombies.append(trainer)  # it was only frozen
        self.was_replaced = True
        number = next_number(settled, self.steps, trainer.reported, released.next_step, is_known=released.is_known)
        step = number - self.steps.first if self.names_steps else 0
        reported = max(trainer.reported, number - 1)
        self.trainers[trainer.slot] = Trainer(trainer.slot, trainer.generation + 1, step=step, reported=reported)

    def begin_anew(self) -> None:
        """The data server is started again: it learns of records from the client, of leases from living trainers."""
        self.table = self.new_table()
        if self.time.is_paused:
            self.table.pause()
        if self.recorded:
            self.table.record(self.round - 1, merge(self.recorded))
        dead = {trainer.slot for trainer in self.trainers.values() if not trainer.alive}
        complete = not dead and not self.was_replaced
        self.table.resume_round(self.round, self.num_slots, self.steps, complete=complete)
        for trainer in self.trainers.values():
            if trainer.alive and self.chance(0.1):
                trainer.alive = False  # before it has said what it has
                self.table.forgo()
            for held in trainer.held if trainer.alive else ():
                lease = self.table.resume(
                    trainer.slot, trainer.generation, held.samples, held.attempts, done=held.done, left=held.left
                )
                if lease is None:
                    raise Broken(f"what trainer {trainer.slot} says to have is not free: {held.samples}")
                held.lease = lease
        for zombie in self.zombies:
            # It wakes up, and says that it still has what was given to others since, or is recorded.
            for held in zombie.held:
                self.table.resume(
                    zombie.slot, zombie.generation, held.samples, held.attempts, done=held.done, left=held.left
                )
        self.check_leases()

    def end_round(self) -> None:
        """Commit a record: what is committed, without the steps that only dead replicas held."""
        kept = [samples for samples in self.committed.values() if not self.chance(0.1)]
        record = tuple(item for samples in kept for item in samples)
        self.table.record(self.round, merge(record) if self.rng.random() < 0.5 else record)
        self.samples.record(record)
        self.recorded += record
        for held in self.late:
            self.table.acknowledge(held.lease, committed=True, now_s=self.now_s)
        self.late.clear()
        if leased(self.table):
            raise Broken(f"still leased after the record: {leased(self.table)}")
        if self.chance(0.2):
            self.num_slots = self.rng.randint(1, MAX_SLOTS)
            self.trainers = {slot: t for slot, t in self.trainers.items() if slot < self.num_slots}
