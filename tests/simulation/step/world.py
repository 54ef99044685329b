"""A whole simulated swarm with faults, the ledger of its samples, a simple coordinator, and what must always hold."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.simulation.step.hosts import (
    SIZES,
    STEPS_PER_ROUND,
    Envelope,
    Hello,
    Join,
    ReplicaHost,
    TrainerHost,
    Work,
)
from tests.simulation.step.network import Network

from shoal.ids import PeerId, StepKey
from shoal.swarm.step_operations import Decision, Schedule
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import StepTrainer
from shoal.wire.messages.step import Commit, Fence, Fenced, StepMessage

NUM_SAMPLES = 20
FAULTS_END_S = 12.0
END_S = 120.0


@dataclass
class Sample:
    """free -> leased -> done -> recorded; doubt: its trainer died in the step `key`."""

    state: str = "free"
    holder: str = ""
    key: StepKey | None = None


class Ledger:
    """The data server: it lives as long as the run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.samples = [Sample() for _ in range(NUM_SAMPLES)]

    def lease(self, trainer: TrainerHost) -> int | None:
        if self.world.incarnations[trainer.slot] != trainer.incarnation:
            return None
        for index, sample in enumerate(self.samples):
            if sample.state == "free":
                self.samples[index] = Sample("leased", trainer.peer)
                return index
        return None

    def note(self, trainer: TrainerHost, key: StepKey, path: tuple[str, ...]) -> None:
        self.world.lives_at[key] = {peer: self.world.lives[peer] for peer in path}
        held = self._held(trainer)
        if held is not None:
            held.key = key

    def acknowledge(self, trainer: TrainerHost) -> None:
        if (held := self._held(trainer)) is not None:
            held.state = "done"

    def give_back(self, trainer: TrainerHost) -> None:
        if (held := self._held(trainer)) is not None:
            held.state = "free"

    def trainer_died(self, peer: str) -> None:
        for sample in self.samples:
            if sample.state == "leased" and sample.holder == peer:
                sample.state = "free" if sample.key is None else "doubt"

    def _held(self, trainer: TrainerHost) -> Sample | None:
        if trainer.sample is None:
            return None
        sample = self.samples[trainer.sample]
        return sample if sample.state == "leased" and sample.holder == trainer.peer else None


class Coordinator:
    """Closes rounds, settles doubt, decides records; reliable here, since rounds have a simulation of their own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.round = 1
        self.members: dict[str, int] = {}
        self.recorded: list[int] = []
        self.recorded_logs: dict[str, list[StepKey]] = {}
        self._joins: dict[str, Join] = {}
        self._resolved: dict[StepKey, Decision | None] = {}
        self._opened_s = 0.0
        self._closed_s: float | None = None
        # Replicas that must still answer the fence of a dead trainer; those that cannot are left to the record.
        self._unfenced: dict[str, set[str]] = {}
        world.network.start("K", self)
        self._tick()

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, Join) and message.round == self.round and self._closed_s is not None:
            self._joins[sender] = message
        elif isinstance(message, Fenced):
            self._on_fenced(sender, message)

    def lost(self, peer: str) -> None:
        self._joins.pop(peer, None)

    def fence(self, trainer: str) -> None:
        self._unfenced[trainer] = {peer for stage in self.world.replicas for peer in stage}

    def _on_fenced(self, replica: str, message: Fenced) -> None:
        for sample in self.world.ledger.samples:
            key = sample.key
            if sample.state != "doubt" or key is None or key.incarnation >= message.incarnations.get(key.trainer, 0):
                continue
            if key in message.committed:
                sample.state = "done"
            elif key not in message.in_doubt:
                waiting = self._unfenced[sample.holder]
                waiting.discard(replica)
                if not waiting:
                    sample.state = "free"

    def _tick(self) -> None:
        network = self.world.network
        network.on_host("K", 0.1, self._tick)
        hello = Hello(self.round, self.members, self._closed_s is not None, dict(self._resolved))
        for peer in [*(p for stage in self.world.replicas for p in stage), *self.world.trainer_peers()]:
            network.send("K", peer, hello)
            if peer[0] == "R":
                network.send("K", peer, Envelope(Fence(dict(self.world.incarnations))))
        trainers = [network.hosts.get(peer) for peer in self.world.trainer_peers()]
        done = all(
            isinstance(t, TrainerHost) and t.steps >= STEPS_PER_ROUND and t.round == self.round for t in trainers
        )
        if self._closed_s is None:
            if done or network.now_s - self._opened_s > 5:
                self._closed_s, self._joins, self._resolved = network.now_s, {}, {}
            return
        late = network.now_s - self._closed_s > 6
        live = [peer for stage in self.world.replicas for peer in stage if network.is_linked("K", peer)]
        # A replica that has committed what was settled as aborted joined too late: it is not in this record.
        joins = {
            peer: join
            for peer, join in self._joins.items()
            if not any(entry.key in self._resolved and self._resolved[entry.key] is None for entry in join.log)
        }
        complete = {peer[1] for peer in joins} == {str(stage) for stage in range(self.world.num_stages)}
        if complete and (late or all(peer in self._joins for peer in live)):
            self._settle_or_decide(joins)

    def _is_done(self, trainer: object) -> bool:
        return isinstance(trainer, TrainerHost) and trainer.steps >= STEPS_PER_ROUND and trainer.round == self.round

    def _settle_or_decide(self, joins: dict[str, Join]) -> None:
        doubts = {key for join in joins.values() for key in join.in_doubt}
        for key in doubts - self._resolved.keys():
            held = [entry for join in joins.values() for entry in join.log if entry.key == key]
            self._resolved[key] = Decision(held[0].scale, held[0].lr, held[0].skipped) if held else None
        if not doubts:
            self._decide(joins)

    def _decide(self, joins: dict[str, Join]) -> None:
        self.world.check_record(joins)
        entries = {entry.key.step: entry for join in joins.values() for entry in join.log}
        samples = [entry.samples[0].start for entry in entries.values()]
        self.recorded += samples
        assert len(set(self.recorded)) == len(self.recorded), f"samples trained twice: {sorted(self.recorded)}"
        for index, sample in enumerate(self.world.ledger.samples):
            if index in samples:
                sample.state = "recorded"
            elif sample.state in ("done", "doubt"):
                sample.state = "free"
        self.members = {peer: join.life for peer, join in joins.items()}
        self.recorded_logs = {peer: [entry.key for entry in join.log] for peer, join in joins.items()}
        self.round += 1
        self._closed_s, self._resolved, self._opened_s = None, {}, self.world.network.now_s


class World:
    """One seed: its swarm and its faults."""

    def __init__(
        self,
        seed: int,
        replica_class: type[StepReplica] = StepReplica,
        trainer_class: type[StepTrainer] = StepTrainer,
        schedule: Schedule | None = None,
    ) -> None:
        self.network = Network(seed)
        self.replica_class, self.trainer_class = replica_class, trainer_class
        self.rng = self.network.rng
        self.num_stages, num_replicas = self.rng.choice([2, 3]), self.rng.choice([1, 2, 3])
        self.num_trainers, self.max_open_steps = self.rng.choice([2, 3]), self.rng.choice([1, 2, 4])
        self.replicas = [[f"R{s}.{i}" for i in range(num_replicas)] for s in range(self.num_stages)]
        # Draws of its own: the faults of a seed are the same with and without caps.
        self.caps_rng = random.Random(f"caps of {seed}")
        capped = [peer for stage in self.replicas for peer in stage if self.caps_rng.random() < 0.3]
        self.caps = {PeerId(peer): self.caps_rng.choice([1, 2]) for peer in capped}
        schedule_rng = random.Random(f"schedule of {seed}")
        self.schedule = schedule or schedule_rng.choice(list(Schedule))
        self.window = None if self.schedule == Schedule.GPIPE else 2
        self.max_held = schedule_rng.choice([None, 1, 2])
        self.lives: dict[str, int] = {}
        self.lives_at: dict[StepKey, dict[str, int]] = {}
        self._num_lives = 0
        self.incarnations = dict.fromkeys(range(self.num_trainers), 1)
        self._commits_left = self.rng.randint(1, 40) if self.rng.random() < 0.6 else 0
        self.ledger = Ledger(self)
        self.coordinator = Coordinator(self)
        for stage in self.replicas:
            for peer in stage:
                ReplicaHost(self, peer)
        for slot in range(self.num_trainers):
            TrainerHost(self, slot, 1, 0)
        for _ in range(self.rng.randint(0, 7)):
            self.network.after(self.rng.uniform(0.2, FAULTS_END_S), self._fault)

    def run(self) -> None:
        """Runs the seed; raises AssertionError where something does not hold."""
        self.network.run(END_S, lambda: len(self.coordinator.recorded) == NUM_SAMPLES)
        states = [sample.state for sample in self.ledger.samples]
        assert len(self.coordinator.recorded) == NUM_SAMPLES, f"no progress: {states}"

    def new_life(self, peer: str) -> int:
        self._num_lives += 1
        self.lives[peer] = self._num_lives
        return self._num_lives

    def trainer_peers(self) -> list[str]:
        return [f"T{slot}.{incarnation}" for slot, incarnation in self.incarnations.items()]

    # ---- faults

    def _fault(self) -> None:
        kind, replica = self.rng.random(), self.rng.choice([p for stage in self.replicas for p in stage])
        trainer, duration_s = self.rng.choice(self.trainer_peers()), self.rng.uniform(0.1, 4.0)
        if kind < 0.3:
            self._crash_replica(replica)
        elif kind < 0.45:
            self._crash_trainer(trainer)
        elif kind < 0.6:
            self._pause(replica, duration_s)
        elif kind < 0.7:
            self._pause(trainer, duration_s)
            if duration_s > 2.0 and self.rng.random() < 0.7:
                # Frozen beyond the deadline: declared dead, replaced, and it wakes up later.
                self.network.after(2.1, lambda: self._replace_trainer(trainer))
        else:
            other = self.rng.choice([p for p in sorted(self.network.hosts) if p not in (replica, "K")] or [trainer])
            self.network.cut(replica, other, duration_s)

    def sabotage(self, trainer: TrainerHost, to: str, message: StepMessage) -> None:
        """Before a Commit: crashes the trainer and lets a replica freeze or be cut off, or cuts the receiver off."""
        if not isinstance(message, Commit) or self._commits_left == 0 or trainer.peer not in self.network.hosts:
            return
        self._commits_left -= 1
        if self._commits_left == 0 and self.rng.random() < 0.4:
            self.network.cut(trainer.peer, to, 2.0)
        elif self._commits_left == 0:
            self._crash_trainer(trainer.peer)
            first = self.rng.choice([p for stage in self.replicas for p in stage])
            if self.rng.random() < 0.5:
                self._pause(first, 3.0)
            else:
                for other in [p for p in self.network.hosts if p not in (first, "K")]:
                    self.network.cut(first, other, 3.0)

    def _crash_replica(self, peer: str) -> None:
        if peer in self.network.hosts:
            self.network.crash(peer)
            self.network.after(self.rng.uniform(0.2, 2.0), lambda: ReplicaHost(self, peer) and None)

    def _crash_trainer(self, peer: str) -> None:
        if peer in self.network.hosts and peer in self.trainer_peers():
            self.network.crash(peer)
            self._replace_trainer(peer)

    def _pause(self, peer: str, duration_s: float) -> None:
        if peer in self.network.hosts:
            self.network.pause(peer, duration_s)

    def _replace_trainer(self, peer: str) -> None:
        if peer not in self.trainer_peers():
            return
        slot, incarnation = int(peer[1]), int(peer.split(".")[1])
        self.incarnations[slot] = incarnation + 1
        self.ledger.trainer_died(peer)
        self.coordinator.fence(peer)
        self.network.after(self.rng.uniform(0.1, 1.0), lambda: TrainerHost(self, slot, incarnation + 1, 0) and None)

    # ---- what must hold

    def check_commit(self, replica: ReplicaHost, key: StepKey, work: Work) -> None:
        parts = [work.gradients[microbatch][0] for microbatch in sorted(work.gradients)]
        trained = [sample for _, start, stop in parts for sample in range(start, stop)]
        assert trained == list(range(sum(SIZES))), f"{key} committed with the samples {trained}"
        cap = self.caps.get(replica.peer, sum(SIZES))
        assert all(stop - start <= cap for _, start, stop in parts), f"{replica.peer} takes {cap} samples, not {parts}"
        chains = {gradient[1:] for gradient in work.gradients.values()}
        assert len(chains) == 1, f"{key} mixes versions or paths: {chains}"
        path = tuple(hop.peer for hop in replica.machine.open[key].request.path)
        chain = chains.pop()
        assert tuple(peer for peer, _, _ in chain) == path, f"{key} holds a gradient of another path"
        assert (replica.peer, replica.life) in [(peer, life) for peer, life, _ in chain], (
            f"{key} is of an earlier round"
        )
        assert key not in replica.applied, f"{key} applied twice"

    def check_record(self, joins: dict[str, Join]) -> None:
        logs = {peer: {entry.key for entry in join.log} for peer, join in joins.items()}
        attempts: dict[tuple[int, int, int], StepKey] = {}
        for peer, keys in logs.items():
            for key in keys:
                assert attempts.setdefault(key.step, key) == key, f"{key} and {attempts[key.step]} are both applied"
                for other, life in self.lives_at[key].items():
                    if other in joins and joins[other].life == life:
                        assert key in logs[other], f"{key} is applied at {peer} and not at {other}"
