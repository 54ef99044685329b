"""A whole swarm in one schedule: trainers drive steps over servers that average and are led by one of some clients.

Steps, rounds and leases are the real machines, all of them; so what one of them asks of another is put to the test: a
join says what the step machine has committed, a takeover settles what trainers that died have left in doubt, and the
record decides about leases that nobody else could settle.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.simulation.liveness import SingleLosses
from tests.simulation.round.hosts import ReplicaHost as RoundHost
from tests.simulation.round.hosts import is_bulk as is_contribution
from tests.simulation.round.world import FAULTS_END_S, SETTLED_S
from tests.simulation.round.world import World as RoundWorld
from tests.simulation.safety import Broken, StepSafety
from tests.simulation.step.hosts import TrainerHost
from tests.simulation.step.hosts import is_bulk as is_tensor
from tests.simulation.step.world import WRAPPED_SHARE
from tests.simulation.swarm.hosts import LAUNCH_S, Client, Launcher, Leases, Server

from shoal.ids import PeerId, StepKey
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.lease import LeaseTable
from shoal.swarm.records import record_hash, trained
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Journal
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.sample_ranges import BatchStream
from shoal.swarm.step_operations import Schedule
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import StepTrainer
from shoal.swarm.takeover import _DOUBT_S as DOUBT_S
from shoal.swarm.takeover import TakeoverMachine
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import Commit, StepMessage

MANY = 100_000
TRAINER_LIMIT_S = DOUBT_S + LAUNCH_S + 0.5
"""From the death of a trainer to the order for the next one to go on: what it has left in doubt may take so long, by
the settings that ship, and whoever can be reached is asked and answers in far less than the rest."""


def _asking(slots_class: type[TrainerSlots], takeover_class: type[TakeoverMachine]) -> type[TrainerSlots]:
    """Trainers whose steps a mutant settles."""

    class Slots(slots_class):
        def _replace(self, training: Any, slot: int, generation: int, now_s: float, *, is_launched: bool) -> None:
            super()._replace(training, slot, generation, now_s, is_launched=is_launched)
            training.replacements[slot].fencing = takeover_class(slot, generation, training.round, now_s)

    return Slots


def is_bulk(message: object) -> bool:
    return is_tensor(message) or is_contribution(message)


class World(RoundWorld):
    """One seed."""

    is_bulk = staticmethod(is_bulk)

    def __init__(
        self,
        seed: int,
        replica_class: type[StepReplica] = StepReplica,
        trainer_class: type[StepTrainer] = StepTrainer,
        member_class: type[RoundMemberMachine] = RoundMemberMachine,
        coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine,
        table_class: type[LeaseTable] = LeaseTable,
        takeover_class: type[TakeoverMachine] = TakeoverMachine,
        host_class: type[RoundHost] = Server,
        faults: bool = True,
        cuts_class: type[CutRule] = CutRule,
        slots_class: type[TrainerSlots] = TrainerSlots,
    ) -> None:
        self.seed, self.slots_class = seed, slots_class
        self.replica_class, self.trainer_class = replica_class, trainer_class
        self.table_class = table_class
        if takeover_class is not TakeoverMachine:
            self.slots_class = _asking(slots_class, takeover_class)
        self.generations: dict[str, int] = {}
        self._num_generations = 0
        self.safety = StepSafety()
        self.caps: dict[PeerId, int] = {}
        self.caps_rng, self.site_rng = random.Random(f"caps of {seed}"), random.Random(f"sites of {seed}")
        self.max_kept: int | None = None
        self.is_wrapped = random.Random(f"wrapping of {seed}").random() < WRAPPED_SHARE
        self.num_fragments = random.Random(f"fragments of {seed}").choice((1, 2, 3))
        cut_rng = random.Random(f"cuts of {seed}")
        self.cut_after, self.last_round = cut_rng.choice((None, 1, 2, 3)), cut_rng.choice((2, 3, MANY))
        self.cuts = cuts_class(self.num_fragments, self.cut_after, self.last_round)
        self.journaled: dict[str, Journal] = {}  # by record, also those that were never committed
        super().__init__(seed, member_class, coordinator_class, host_class, Client, faults)

    def cut_in(self, round: int) -> int | None:
        """After how many commits of this round a replica is cut; None: at its join."""
        return None if round == self.last_round else self.cut_after

    def sizes(self) -> tuple[int, int]:
        return 2, self.network.rng.choice((1, 2, 2, 3))

    def prepare(self) -> None:
        self.settings = replace(self.settings, cuts=self.cuts)
        rng = self.network.rng
        self.num_trainers, self.max_open_steps = rng.choice((1, 2, 2)), rng.choice((1, 2, 4))
        self.schedule = rng.choice(list(Schedule))
        self.window = None if self.schedule == Schedule.GPIPE else 2
        self.hops = tuple(
            tuple(Hop(PeerId(f"R{stage}.{slot}"), ()) for slot in range(self.num_slots))
            for stage in range(self.num_stages)
        )
        self.commits_left = rng.randint(1, 40) if rng.random() < 0.6 else 0
        # How many commits are applied before each outage of a site.
        outages = self.site_rng.choice((0, 1, 2, 3)) if self.has_faults else 0
        self.outages = [self.site_rng.randint(1, 30) for _ in range(outages)]
        self.begun: set[str] = set()  # records on top of which trainers were told to train
        self.leases = self.ledger = Leases(self)
        self.losses = SingleLosses(self.network)
        self.launcher = Launcher(self)
        self.tells_rng = random.Random(f"tells of {self.seed}")

    def new_table(self) -> LeaseTable:
        return self.table_class(BatchStream(MANY, 1), deterministic=self.network.rng.random() < 0.5, max_samples=1)

    def new_generation(self, peer: str) -> int:
        self._num_generations += 1
        self.generations[peer] = self._num_generations
        return self._num_generations

    def trainer_peers(self) -> list[str]:
        return [f"T{slot}.{generation}" for slot, generation in self.launcher.generations.items()]

    def tells(self, client: Client, trainer: PeerId) -> None:
        """Before a trainer is told of a round: now and then its client crashes, and the others have been told."""
        if self.has_faults and self.tells_rng.random() < 0.02 and self.network.now_s < FAULTS_END_S - 4.0:
            self.crash_client(client.peer, loses_power=False)

    def before_send(self, trainer: TrainerHost, to: str, message: StepMessage) -> None:
        """Before a Commit: now and then the trainer crashes, and a replica may be cut off from the others."""
        network, rng = self.network, self.network.rng
        if not self.commits_left or type(message) is not Commit or trainer.peer not in network.hosts:
            return
        if network.now_s > FAULTS_END_S - 4.0:
            return
        self.commits_left -= 1
        if self.commits_left % 6 == 0:
            self._crash(trainer.peer)
            if rng.random() < 0.5:
                first = rng.choice(self.replicas)
                for other in [peer for peer in self.replicas if peer != first]:
                    network.cut(first, other, 3.0)

    def applied(self, key: StepKey, path: list[PeerId]) -> None:
        """A replica has committed: now and then its whole path is cut off right then, from all clients and trainers.

        Such replicas are a site: they go on hearing each other. Often the trainer dies in the outage.
        """
        if not self.outages or self.network.now_s > FAULTS_END_S - 7.0:
            return
        self.outages[0] -= 1
        if self.outages[0] > 0:
            return
        del self.outages[0]
        rng = self.site_rng
        duration_s = rng.choice((rng.uniform(0.5, 1.5), rng.uniform(1.0, 6.0)))
        later = range(1, 4)
        trainers = [f"T{slot}.{i + more}" for slot, i in self.launcher.generations.items() for more in (0, *later)]
        for replica in path:
            for other in (*self.clients, *trainers):
                self.network.cut(replica, other, duration_s)
        trainer = f"T{key.trainer}.{key.generation}"
        if rng.random() < 0.5:
            self._crash(trainer)
        elif rng.random() < 0.5:
            self.network.after(rng.uniform(0.2, duration_s), self._crash, trainer)

    def _train(self) -> None:
        """The trainers do."""

    def committed(self, client: PeerId, record: Record, signed: SignedRecord) -> None:
        super().committed(client, record, signed)
        self.leases.table.record(record.round, (*record.samples, *record.skipped))
        self._check_numbers(record_hash(signed))
        self._check_weights(record, record_hash(signed))

    def _check_numbers(self, digest: str) -> None:
        """No number of a slot is that of two steps: whoever goes on for a lost trainer begins after all that count."""
        if digest not in self.journaled:
            return
        keys: dict[tuple[int, int], StepKey] = {}
        for _, log in self.journaled[digest].logs.values():
            for key in (entry.key for entry in log):
                other = keys.setdefault((key.trainer, key.number), key)
                if other != key:
                    raise Broken(f"{other} and {key} have one number")

    def _check_weights(self, record: Record, digest: str) -> None:
        """A member weighs what it has trained since the last cut of the fragment, as far as it was a member of the
        records since: nothing that is in no record of the chain, and nothing twice."""
        if digest not in self.journaled:
            return
        for outcome in record.stages:
            for peer, weight in zip(outcome.members, outcome.weights, strict=True):
                found, at = [0], digest
                for back in range(self.num_fragments + 1):
                    journal = self.journaled.get(at)
                    if journal is None or peer not in journal.logs:
                        break
                    _, log = journal.logs[peer]
                    cut = self.cut_in(journal.record.round)
                    cut = len(log) if cut is None else cut
                    part = log[:cut] if back == 0 else log[cut:] if back == self.num_fragments else log
                    found.append(found[-1] + trained(part).num_targets)
                    at = journal.record.previous
                if weight not in found[1:]:
                    raise Broken(f"{peer} weighs {weight} in record {record.round}, and has trained {found[1:]}")

    # -- faults

    def _fallible(self) -> list[str]:
        return [*super()._fallible(), *self.trainer_peers()]

    def _crash(self, peer: str) -> None:
        if peer[0] != "T":
            super()._crash(peer)
        elif peer in self.network.hosts and peer in self.trainer_peers():
            client = self.launcher.client
            is_missed = client is not None and self.network.hosts.get(client.peer) is client and client.trains(peer)
            self.network.crash(peer)
            if is_missed:
                self.losses.lost(f"the trainer of slot {peer[1]}", TRAINER_LIMIT_S)

    def kill_trainer(self, peer: str) -> None:
        """Its process ends, if it has not."""
        self._crash(peer)

    def run(self) -> int:
        self.network.at(SETTLED_S, self._count)
        rounds = super().run()
        if not self.is_split and not self.is_enough():
            raise Broken(f"nothing was trained after the last fault: {len(self.samples.recorded)} samples")
        return rounds

    def is_enough(self) -> bool:
        return len(self.samples.recorded) > self.num_before

    def _count(self) -> None:
        self.num_before = len(self.samples.recorded)
