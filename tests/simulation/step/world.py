"""Training steps under faults: two or three trainers that share the replicas of each stage in any order."""

from __future__ import annotations

import random

from tests.simulation import liveness
from tests.simulation.faults import Faults
from tests.simulation.liveness import SingleLosses
from tests.simulation.network import DEADLINE_S, NOTICE_S, Manners, Network
from tests.simulation.safety import Broken, SampleSafety, StepSafety
from tests.simulation.step.coordinator import NUM_SAMPLES, Coordinator, Ledger
from tests.simulation.step.hosts import ReplicaHost, TrainerHost, is_bulk
from tests.simulation.step.replacement import Replacement

from shoal.ids import PeerId
from shoal.swarm.cut_rule import EVERY_STEP
from shoal.swarm.step_operations import Schedule
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import StepTrainer
from shoal.wire.messages.base import Hop
from shoal.wire.messages.step import Commit, StepMessage

FAULTS_END_S = 14.0
STEP_LIMIT_S = 36.0
"""After the last fault a step follows the one before within so long, in virtual time: a dozen of its timeouts."""
END_S = FAULTS_END_S + NUM_SAMPLES * STEP_LIMIT_S
"""Over a slow network a round of 5 s has one step: how long all of them take is not the world's to say."""
LONE_DEATH_LIMIT_S = 3.5
"""Where nothing else goes wrong, a step that a dead replica was on is over within so long, as docs/reliability.md says:
0.3 s and two steps, of which one takes up to 1.6 s here where two trainers share what is left."""
WRAPPED_SHARE = 0.25
"""Of the runs, those in which the first stage has the head as well."""
AVOIDED_S = 1.0
"""For so long at most a trainer leaves a replica alone that it can reach (`swarm/step_trainer.py`)."""


class World(Replacement):
    """One seed: its swarm and its faults; in some runs the only one is the death of a replica that steps run over.

    Args:
        seed: Decides everything.
        replica_class, trainer_class: The machines, or mutants of them.
        host_class: What computes, or a mutant of it.
        schedule: Of all replicas; drawn if it is not given.
        is_wrapped: Whether the first stage has the head as well; drawn likewise.
    """

    def __init__(
        self,
        seed: int,
        replica_class: type[StepReplica] = StepReplica,
        trainer_class: type[StepTrainer] = StepTrainer,
        host_class: type[ReplicaHost] = ReplicaHost,
        schedule: Schedule | None = None,
        is_wrapped: bool | None = None,
    ) -> None:
        # Of its own source, as below: a seed without these faults is the same run as ever.
        self.own_rng = random.Random(f"own faults of {seed}")
        is_calm = self.own_rng.random() < 0.15
        self.network = network = Network(seed, is_bulk, Manners() if is_calm else None)
        self.replica_class, self.trainer_class, self.host_class = replica_class, trainer_class, host_class
        self.rng = rng = network.rng
        self.num_stages, num_replicas = rng.choice([2, 3]), rng.choice([2, 3] if is_calm else [1, 2, 3])
        # In a calm run the replica that is left can take the steps of all trainers.
        self.num_trainers = rng.choice([2] if is_calm else [2, 3])
        self.max_open_steps = rng.choice([4] if is_calm else [1, 2, 4])
        self.replicas = [[PeerId(f"R{s}.{i}") for i in range(num_replicas)] for s in range(self.num_stages)]
        self.replica_peers = [peer for stage in self.replicas for peer in stage]
        self.hops = tuple(tuple(Hop(peer, ()) for peer in stage) for stage in self.replicas)
        # Draws of its own: the faults of a seed are the same with and without caps.
        self.caps_rng = random.Random(f"caps of {seed}")
        capped = [peer for peer in self.replica_peers if self.caps_rng.random() < 0.3 and not is_calm]
        self.caps = {peer: self.caps_rng.choice([1, 2]) for peer in capped}
        schedule_rng = random.Random(f"schedule of {seed}")
        self.schedule = schedule or schedule_rng.choice(list(Schedule))
        self.window = None if self.schedule == Schedule.GPIPE else 2
        self.max_kept = schedule_rng.choice([None, 1, 2])
        self.rooms_rng = random.Random(f"rooms of {seed}")
        self.rooms: dict[PeerId, int] = {}
        if self.schedule != Schedule.GPIPE and not is_calm and self.rooms_rng.random() < 0.3:
            # One at a time is little over any path, so that the window grows.
            self.window = 1
            self.rooms = {peer: self.rooms_rng.choice([1, 2, 4]) for peer in self.replica_peers}
        # Of a source of its own: in all else the seed is the same run as ever.
        draws_wrapped = random.Random(f"wrapping of {seed}").random() < WRAPPED_SHARE
        self.cuts = EVERY_STEP
        self.is_wrapped = draws_wrapped if is_wrapped is None else is_wrapped
        self.generations: dict[str, int] = {}
        self._num_generations = 0
        self.losses = SingleLosses(network)
        self.generations = dict.fromkeys(range(self.num_trainers), 1)
        self._commits_left = rng.randint(1, 40) if rng.random() < 0.6 and not is_calm else 0
        has_witness = not is_calm and self.num_stages > 2 and self.own_rng.random() < 0.4
        self._first_commits_left = self.own_rng.randint(1, 12) if has_witness else 0
        self.safety, self.samples = StepSafety(), SampleSafety()
        self.ledger = Ledger(self)
        self.coordinator = Coordinator(self)
        for peer in self.replica_peers:
            host_class(self, peer)
        for slot in range(self.num_trainers):
            TrainerHost(self, slot, 1, 0)
        for peer in self.rooms:
            network.at(self.rooms_rng.uniform(0.5, FAULTS_END_S), self._take_room, peer)
        self.coordinator.start()
        self.faults = Faults(network, self._fallible, self._crash, FAULTS_END_S, self._froze)
        if is_calm:
            network.at(self.own_rng.uniform(0.3, 8.0), self._lone_death)
        else:
            self.faults.plan(7)

    def run(self) -> None:
        """Run the seed.

        Raises:
            Broken: Something does not hold.
        """
        recorded = self.samples.recorded

        def all_done() -> bool:
            return len(recorded) == NUM_SAMPLES

        self.network.run(FAULTS_END_S, all_done)
        liveness.keeps_going(self.network, END_S, STEP_LIMIT_S, lambda: len(recorded), all_done)
        liveness.all_recorded(recorded, NUM_SAMPLES, [sample.state for sample in self.ledger.samples])

    def new_generation(self, peer: str) -> int:
        self._num_generations += 1
        self.generations[peer] = self._num_generations
        return self._num_generations

    # ---- faults

    def _fallible(self) -> list[str]:
        return [*self.replica_peers, *self.trainer_peers()]

    def before_send(self, trainer: TrainerHost, to: str, message: StepMessage) -> None:
        """Before a Commit: crashes the trainer and lets a replica freeze or be cut off, or cuts the receiver off."""
        if self._first_commits_left and isinstance(message, Commit) and to == self.ledger.path_of(trainer)[1]:
            self._first_commits_left -= 1
            if self._first_commits_left == 0:
                self._lose_the_first_committer(trainer.peer, self.ledger.path_of(trainer))
        if self._commits_left == 0 or not isinstance(message, Commit) or trainer.peer not in self.network.hosts:
            return
        self._commits_left -= 1
        if self._commits_left == 0 and self.rng.random() < 0.4:
            self.network.cut(trainer.peer, to, 2.0)
        elif self._commits_left == 0:
            self._crash(trainer.peer)
            first = self.rng.choice(self.replica_peers)
            if self.rng.random() < 0.5:
                self.faults.pause(first, 3.0)
            else:
                for other in [peer for peer in self.network.hosts if peer not in (first, "K")]:
                    self.network.cut(first, other, 3.0)

    def _lose_the_first_committer(self, trainer: str, path: tuple[str, ...]) -> None:
        """Who alone has its Commit cannot tell one of the others, and is started again when it has told the other."""
        network, rng = self.network, self.own_rng
        first, *others = path
        for other in others:
            network.cut(trainer, other, 3.0)
        network.cut(first, rng.choice(others), rng.uniform(0.5, 3.0))
        network.after(rng.uniform(0.1, 0.6), self._crash, first)

    def _take_room(self, replica: PeerId) -> None:
        """Its memory proves to be smaller than it has said."""
        self.rooms[replica] = 1
        host = self.network.hosts.get(replica)
        if isinstance(host, ReplicaHost):
            host.machine.room = 1

    def _lone_death(self) -> None:
        """Kill a replica that steps run over, and see that they are over soon."""
        hit = self.ledger.under_way()
        if not hit:
            self.network.after(0.05, self._lone_death)
            return
        victim = self.own_rng.choice(sorted({peer for path in hit.values() for peer in path}))
        self.network.crash(victim)
        self.network.after(self.own_rng.uniform(0.2, 2.0), self.host_class, self, victim)
        for step in [step for step, path in hit.items() if victim in path]:
            self.network.after(LONE_DEATH_LIMIT_S, self._is_over, step, victim)

    def _is_over(self, step: tuple[int, int, int], victim: str) -> None:
        if step in self.ledger.under_way():
            raise Broken(f"step {step} goes on {LONE_DEATH_LIMIT_S} s after {victim} died, and nobody else did")

    def _crash(self, peer: str) -> None:
        if peer not in self.network.hosts:
            return
        if peer in self.replica_peers:
            is_silent = self.rng.random() < 0.2
            self._lose(peer, DEADLINE_S if is_silent else NOTICE_S)
            self.network.crash(peer, silently=is_silent)
            self.network.after(self.rng.uniform(0.2, 2.0), self.host_class, self, peer)
        elif peer in self.trainer_peers():
            self.network.crash(peer)
            self._replace_trainer(peer)

    def _lose(self, replica: str, notice_s: float) -> None:
        """Each step that has not begun to commit begins anew over another replica, as soon as the loss is noticed."""
        stage = self.replicas[int(replica[1])]
        if not any(self.network.awake(other) for other in stage if other != replica):
            return
        for trainer in [host for host in self.network.hosts.values() if isinstance(host, TrainerHost)]:
            if trainer.runs_over(replica):
                self.losses.lost(f"another attempt of {trainer.peer}", notice_s + AVOIDED_S)

    def trainer_died(self, peer: str, slot: int, generation: int) -> None:
        self.ledger.trainer_died(peer)
        self.coordinator.fence(peer)
