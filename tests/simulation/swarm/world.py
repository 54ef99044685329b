"""A whole swarm in one schedule: trainers drive steps over servers that average and are led by one of some clients.

Steps, rounds and leases are the real machines, all of them; so what one of them asks of another is put to the test: a
join says what the step machine has committed, a takeover settles what trainers that died have left in doubt, and the
record decides about leases that nobody else could settle.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from tests.simulation.liveness import SingleLosses
from tests.simulation.round.hosts import Left
from tests.simulation.round.hosts import ReplicaHost as RoundHost
from tests.simulation.round.hosts import is_bulk as is_contribution
from tests.simulation.round.world import FAULTS_END_S, SETTLED_S
from tests.simulation.round.world import World as RoundWorld
from tests.simulation.safety import Broken, StepSafety
from tests.simulation.step.hosts import TrainerHost
from tests.simulation.step.hosts import is_bulk as is_tensor
from tests.simulation.step.world import WRAPPED_SHARE
from tests.simulation.swarm.hosts import Client, Launcher, Leases, Server, steps_of

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
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import Commit, StepMessage

MANY = 100_000
TRAINER_LIMIT_S = DOUBT_S + 0.5
"""From the death of a trainer to the order for the next one to go on: what it has left in doubt may take so long, by
the settings that ship, and whoever can be reached is asked and answers in far less than the rest. The next one is
launched meanwhile."""


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
        client_class: type[Client] = Client,
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
        self.rooms: dict[PeerId, int] = {}
        self.caps_rng, self.site_rng = random.Random(f"caps of {seed}"), random.Random(f"sites of {seed}")
        self.max_kept: int | None = None
        self.is_wrapped = random.Random(f"wrapping of {seed}").random() < WRAPPED_SHARE
        self.num_fragments = random.Random(f"fragments of {seed}").choice((1, 2, 3))
        cut_rng = random.Random(f"cuts of {seed}")
        self.cut_after, self.last_round = cut_rng.choice((None, 1, 2, 3)), cut_rng.choice((2, 3, MANY))
        self.cuts = cuts_class(self.num_fragments, self.cut_after, self.last_round)
        self.journaled: dict[str, Journal] = {}  # by record, also those that were never committed
        self.deaths_rng = random.Random(f"deaths of {seed}")
        self.round_s = self.deaths_rng.choice((2.5, 2.5, 4.0))
        super().__init__(seed, member_class, coordinator_class, host_class, client_class, faults)
        self.loses_frames = bool(self.network.manners.loss_rate)

    @property
    def deadline_s(self) -> float:  # type: ignore[override]
        """After so long trainers are waited for no longer."""
        return self.round_s

    def steps_of(self, round: int) -> StepRange:
        return steps_of(round)

    def left_to(self, client: PeerId) -> Left | None:
        """The trainers are those of one host, on which one client after the other is started."""
        return None if self.knows_nothing(client) else self._left

    def leaves(self, client: PeerId, left: Left) -> None:
        self._left = left
        super().leaves(client, left)

    def _elect(self) -> None:
        super()._elect()
        for client in self.client_hosts():
            if isinstance(client, Client) and self.network.awake(client.peer):
                client.take_trainers()

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
        self._left: Left | None = None  # by whichever client has the trainers
        self.leases = self.ledger = Leases(self)
        self.losses = SingleLosses(self.network)
        self.launcher = Launcher(self)
        self.tells_rng = random.Random(f"tells of {self.seed}")
        self.short_lived_rate = self.deaths_rng.choice((0.0, 0.0, 0.2)) if self.has_faults else 0.0
        self.leaves_orphan = self.has_faults and self.deaths_rng.random() < 0.3
        is_doomed = self.has_faults and self.deaths_rng.random() < 0.2
        begin_s = self.deaths_rng.uniform(1.0, FAULTS_END_S - 8.0)
        self._doomed_s = (begin_s, begin_s + self.deaths_rng.uniform(1.0, 4.0)) if is_doomed else (0.0, 0.0)
        for _ in range(self.deaths_rng.choice((0, 0, 6)) if self.has_faults else 0):
            self.network.at(self.deaths_rng.uniform(1.0, FAULTS_END_S - 4.0), self._blink)
        self._num_applied: Counter[StepKey] = Counter()

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

    def plan_faults(self) -> None:
        """In a quarter of the runs trainers are all that goes wrong, so that the rest is calm enough to be judged."""
        rng = self.deaths_rng
        if rng.random() >= 0.25:
            super().plan_faults()
            return
        self.outages, self.commits_left, self.sabotage, self.meddling = [], 0, None, 0
        self.network.manners.slow_rate = self.network.manners.loss_rate = 0.0
        self.round_s = 4.0
        self.short_lived_rate, self.launcher.stuck_rate = rng.choice((0.0, 0.3)), rng.choice((0.0, 0.3))
        for _ in range(rng.randint(3, 8)):
            self.network.at(rng.uniform(1.0, FAULTS_END_S - 1.0), self._kill_any)

    def _kill_any(self) -> None:
        self._crash(self.deaths_rng.choice(self.trainer_peers()))

    def greeted(self, trainer: PeerId) -> None:
        """A trainer says hello: now and then it dies soon after, told of the round or not; and those of one slot do so
        again and again, for a while."""
        now_s, rng = self.network.now_s, self.deaths_rng
        is_doomed = trainer.startswith("T0") and self._doomed_s[0] < now_s < self._doomed_s[1]
        if is_doomed or (now_s < FAULTS_END_S - 4.0 and rng.random() < self.short_lived_rate):
            self.network.after(rng.uniform(0.0, 0.2), self._crash, trainer)

    def _blink(self) -> None:
        """A trainer and its client are cut off from each other; both live, and the trainer may be back at once. In the
        other half a site goes with it, over which it trains on."""
        client, rng = self.launcher.client, self.deaths_rng
        if client is None:
            return
        trainer, site = rng.choice(self.trainer_peers()), rng.randrange(2 * self.num_slots)
        self.network.cut(client.peer, trainer, rng.choice((0.0, rng.uniform(0.0, 0.3), rng.uniform(0.5, 2.0))))
        for replica in self.replicas:
            if replica.endswith(f".{site}"):
                self.network.cut(client.peer, replica, rng.uniform(0.5, 2.0))

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
        self._leave_orphan(key, path)
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

    def _leave_orphan(self, key: StepKey, path: list[PeerId]) -> None:
        """In the first round a step that all have committed may be known to one only that nobody can reach for a while:
        another one dies with it, and begins the same round anew, and so does the trainer."""
        self._num_applied[key] += 1
        if not self.leaves_orphan or self._num_applied[key] < len(path):
            return
        self.leaves_orphan = False
        rng = self.deaths_rng
        *others, dies = rng.sample(path, len(path))
        host = self.network.hosts.get(dies)
        if not isinstance(host, Server) or host.machine.tip.round or self.twin(host) is None:
            return
        self._crash(f"T{key.trainer}.{key.generation}")
        for other in others:
            for peer in (*self.clients, *self.trainer_peers()):
                self.network.cut(other, peer, 1.0)
        self.network.crash(dies)
        self.tell_clients()
        self.network.after(rng.uniform(0.05, 0.3), self.restart_replica, dies)

    def check_rest(self, slot: int, first: int, rest: StepRange) -> None:
        """A lost trainer costs the step in progress at most, which is trained again.

        That is in this round, or in a later one if nobody is left who could say that an attempt was not committed.
        """
        steps = [host.steps for host in self.replica_hosts() if isinstance(host, Server) and host.steps is not None]
        keys = [*self._num_applied, *(key for each in steps for key in each.machine.in_doubt)]
        kept = {key.number for key in keys if key.trainer == slot}
        lost = [number for number in range(first, rest.first) if number not in kept]
        if lost == [rest.first - 1] and self._has_attempt_without_witness(slot, rest.first - 1):
            return
        if lost:
            raise Broken(f"the trainer of slot {slot} goes on at step {rest.first}, and nobody has trained {lost}")

    def _has_attempt_without_witness(self, slot: int, number: int) -> bool:
        attempts = [at for key, at in self.safety.generations_at.items() if (key.trainer, key.number) == (slot, number)]
        hosts = self.network.hosts
        return not all(any(peer in hosts and self.generations[peer] == at[peer] for peer in at) for at in attempts)

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
