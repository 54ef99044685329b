"""Outer rounds under faults: 1 to 4 clients with takeover, 2 to 4 stages, 1 to 4 replicas of each."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Collection

from tests.simulation import liveness
from tests.simulation.disk import Disk
from tests.simulation.faults import Faults
from tests.simulation.network import Manners, Network
from tests.simulation.round.checks import PATIENCE_S, Checks, samples_of
from tests.simulation.round.hosts import ClientHost, Left, ReplicaHost, digest, holds, is_bulk
from tests.simulation.round.mirrors import Copy, MirrorHost, Mirrors
from tests.simulation.round.passing import Passing
from tests.simulation.round.resuming import Keeping, Resumption
from tests.simulation.safety import Broken, ChainSafety, SampleSafety, Split

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.mirror import MirrorMachine
from shoal.swarm.records import seal, unseal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import TrainedTwice
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_settings import RoundSettings
from shoal.swarm.sample_ranges import Ranges, merge
from shoal.wire.messages.base import SampleRange, StepRange
from shoal.wire.messages.round import CommitRecord, OrderNamed, PrepareRecord, Record, SignedRecord, Staged
from shoal.wire.messages.step import StepEntry

GENESIS = "genesis"
FAULTS_END_S = 22.0
SETTLED_S = 27.0
END_S = 42.0
LAST_S = 60.0
ROUND_LIMIT_S = 12.0
"""After the last fault a round ends so long after the one before, in virtual time: a record that nobody can finish is
waited for, then a quorum that does not end is proposed anew (`drop_after_s` and `stage_timeout_s` below). A client that
still contests with the one that leads, and takes its ballot from it, begins to wait when it has chosen."""
_ON_RECORDS = frozenset((PrepareRecord, OrderNamed, CommitRecord))


class DataServer:
    """Gives out samples 0, 1, 2, ...; outlives its client. What is in no record of its round becomes free again.

    But only for steps on top of that record: of a split swarm the other side, which does not know it, goes on with the
    samples that it has, as it does with a data server of its own.
    """

    def __init__(self) -> None:
        self.recorded: set[int] = set()
        self._given: defaultdict[str, set[int]] = defaultdict(set)  # by the record on top of which they are trained
        self._round = 0
        self._all_below = 0

    def lease(self, base: str) -> int:
        given, sample = self._given[base], self._all_below
        while sample in given or sample in self.recorded:
            sample += 1
        given.add(sample)
        return sample

    def record(self, record: Record) -> None:
        if record.round > self._round:
            self._round = record.round
            self.recorded.update(samples_of(record))
            while self._all_below in self.recorded:
                self._all_below += 1

    def begin_anew(self, round: int, used: Ranges) -> None:
        """The run goes on from a record: these are all samples that are used."""
        self._given.clear()
        self._round, self._all_below = round, 0
        self.recorded = {number for item in used for number in range(item.start, item.stop)}

    def recorded_ranges(self) -> tuple[SampleRange, ...]:
        return merge(SampleRange(0, k, k + 1) for k in self.recorded)


class World:
    """One seeded run.

    Args:
        seed: Decides everything.
        member_class, coordinator_class: The machines, or mutants of them.
        host_class, client_class: What averages and what leads, or mutants of them.
        mirror_class: The machine of mirrors, or a mutant of it.
        keeping_class: What a client does with the checkpoint from which it goes on, or a mutant of it.
        faults: Whether anything goes wrong.
    """

    is_bulk = staticmethod(is_bulk)
    can_resume = False
    round_s = 2.5
    """After so long the trainers of all clients are done, again and again."""
    deadline_s = math.inf
    """After so long they are waited for no longer."""

    def __init__(
        self,
        seed: int,
        member_class: type[RoundMemberMachine] = RoundMemberMachine,
        coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine,
        host_class: type[ReplicaHost] = ReplicaHost,
        client_class: type[ClientHost] = ClientHost,
        faults: bool = True,
        mirror_class: type[MirrorMachine] = MirrorMachine,
        keeping_class: type[Keeping] = Keeping,
    ) -> None:
        self.network = Network(seed, self.is_bulk, None if faults else Manners())
        self.has_faults, self.client_class = faults, client_class
        self.is_split = False
        self.has_begun = False  # some client has begun to train
        self._diaries: dict[PeerId, Left] = {}
        self.led_under: Ballot | None = None  # of the client that was the last to choose a record to go on from
        rng = self.network.rng
        self.member_class, self.coordinator_class, self.host_class = member_class, coordinator_class, host_class
        self.num_stages, self.num_slots = self.sizes()
        self.passing = Passing(self, seed, self.num_stages, self.num_slots)
        times_s = 0.3, 8.0, 4.0, PATIENCE_S
        self.settings = RoundSettings("sim", self.num_stages, GENESIS, *times_s, passing=self.passing.rule)
        self.flip_rate = rng.choice((0.0, 0.0, 0.02)) if faults else 0.0
        self.doubt_rate = rng.choice((0.0, 0.2)) if faults else 0.0
        is_sabotaged = faults and rng.random() < 0.6
        self.sabotage = [rng.randint(1, 40), rng.choice((0.0, 3.0, 6.0, 9.0))] if is_sabotaged else None
        self.meddling = rng.choice((1, 2, 4, rng.randint(1, 30))) if faults and rng.random() < 0.4 else 0
        self.data = DataServer()
        self.samples, self.checks = SampleSafety(), self.make_checks()
        self.chain = ChainSafety(self.checks.is_heard)
        self.prepare()
        self.num_steps = 0
        own_rng = random.Random(f"start {seed}")
        self._odd_start = own_rng.randrange(self.num_slots) if faults and own_rng.random() < 0.05 else None
        self._unsealed: dict[bytes, Record] = {}
        self.replicas = [
            PeerId(f"R{stage}.{slot}") for stage in range(self.num_stages) for slot in range(self.num_slots)
        ]
        self.mirrors = Mirrors(self, seed, mirror_class)
        self.resumption = Resumption(self, seed, keeping_class)
        self.clients = [PeerId(f"C{number}") for number in range(self.num_clients())]
        self.disks = {peer: Disk() for peer in self.clients}
        for peer in self.replicas:
            self._start_replica(peer, int(peer[1]))
        for peer in self.clients:
            self.start_client(peer)
        self.network.after(0.5, self._train)
        self.network.after(self.round_s, self._close)
        self.network.after(0.3, self._elect)
        if not faults:
            return
        self.mirrors.plan(FAULTS_END_S)
        self.resumption.plan(FAULTS_END_S)
        self.faults = Faults(self.network, self._fallible, self._crash, FAULTS_END_S, self._froze)
        self.plan_faults()

    def prepare(self) -> None:
        """What a world that has more processes needs before the first of these starts."""

    def start_of(self, peer: PeerId, stage: int) -> str:
        """What a replica computes for D_0. In some worlds one of each stage has another version of the libraries."""
        return digest("initial", stage, *(["another version"] if int(peer[3:]) == self._odd_start else []))

    def sizes(self) -> tuple[int, int]:
        """How many stages there are, and how many replicas of each."""
        rng = self.network.rng
        return rng.choice((2, 2, 3, 4)), rng.choice((1, 2, 2, 3, 4))

    def num_clients(self) -> int:
        """How many hosts have one."""
        return self.network.rng.choice((1, 1, 2, 2, 3, 4))

    def plan_faults(self) -> None:
        """What goes wrong, and when."""
        rng = self.network.rng
        self.faults.plan(8, 1.0)
        if rng.random() < 0.4:
            self.network.at(rng.uniform(1.0, FAULTS_END_S - 2.0), self._lose_stages)

    def left_to(self, client: PeerId) -> Left | None:
        """What an earlier start of a client has left to it."""
        return self._diaries.get(client)

    def ballot_of(self, client: PeerId) -> int:
        """The number of the last ballot of an earlier start of a client, as far as that is known."""
        left = self._diaries.get(client)
        return 0 if left is None else left.ballot_number

    def leaves(self, client: PeerId, left: Left) -> None:
        """A client has begun a round."""
        self._diaries[client] = left

    def knows_nothing(self, client: PeerId) -> bool:
        """Whether a client is on another host than before, and has begun no round there."""
        return client in self.mirrors.forgetful and client not in self._diaries

    def forget(self, client: PeerId) -> None:
        """The next start of a client knows nothing."""
        self._diaries.pop(client, None)

    def steps_of(self, round: int) -> StepRange:
        """The numbers of a round's steps, which no check looks at here."""
        return StepRange(round, round + 1)

    def pool_of(self, client: PeerId) -> DataServer:
        """Where a client's trainers get their samples."""
        return self.data

    # -- what runs

    def replica_hosts(self) -> list[ReplicaHost]:
        hosts = self.network.hosts
        return [hosts[peer] for peer in self.replicas if peer in hosts]  # type: ignore[misc]

    def client_hosts(self) -> list[ClientHost]:
        hosts = self.network.hosts
        return [hosts[peer] for peer in self.clients if peer in hosts]  # type: ignore[misc]

    def seal_as(self, peer: PeerId) -> Callable[[Record], SignedRecord]:
        return lambda record: seal(record, peer, lambda body: body[:8])

    def unseal(self, signed: SignedRecord) -> Record:
        record = self._unsealed.get(signed.body)
        if record is None:
            record = self._unsealed[signed.body] = unseal(signed, "sim", lambda _peer, _body, _signature: None)
        return record

    def send(self, sender: str, receiver: str, message: object) -> None:
        """Send; now and then the coordinator crashes between two sends of one message to all, or loses a member in a
        ring."""
        if sender not in self.network.hosts:
            return
        self.network.send(sender, receiver, message)
        if self.sabotage is not None and sender in self.disks and type(message) in _ON_RECORDS:
            self.sabotage[0] -= 1
            if self.sabotage[0] == 0 and self.network.now_s < FAULTS_END_S - 9.0:
                if self.sabotage[1] and receiver in self.network.hosts:
                    self.network.pause(receiver, self.sabotage[1])
                self._crash(sender)
        elif self.meddling and type(message) is Staged:
            self.meddling -= 1
            if self.meddling == 0 and self.network.now_s < FAULTS_END_S - 1.0:
                self.network.cut(receiver, self.network.rng.choice(self.replicas), 0.5)
                if receiver in self.network.hosts and self.network.rng.random() < 0.5:
                    self.crash_client(PeerId(receiver), loses_power=True)

    def make_checks(self) -> Checks:
        return Checks(self)

    def committed(self, client: PeerId, record: Record, signed: SignedRecord) -> None:
        """A client says that this is committed."""
        self.checks.committed(record, signed)
        self.pool_of(client).record(record)
        self.mirrors.committed()
        self.resumption.committed(record, signed)

    def trained_twice(self, found: TrainedTwice) -> None:
        """A coordinator sees what no lease may let happen."""
        raise Broken(f"{found.first} and {found.second} have trained on the same samples")

    def _start_replica(self, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        self.network.start(peer, self.host_class(self, peer, stage, is_behind))
        self.tell_clients()

    def new_client(self, peer: PeerId) -> ClientHost:
        return self.client_class(self, peer)

    def start_client(self, peer: PeerId) -> None:
        if peer in self.network.hosts:
            return
        if not self.resumption.may_start(peer):
            self.network.after(0.5, self.start_client, peer)
            return
        host = self.new_client(peer)
        self.network.start(peer, host)
        self.resumption.started(host)
        self._see(peer)

    def tell_clients(self) -> None:
        for client in self.clients:
            if client in self.network.hosts:
                self.network.on_host(client, 0.05, self._see, client)

    def _see(self, client: PeerId) -> None:
        host = self.network.hosts.get(client)
        if isinstance(host, ClientHost):
            if self.mirrors.peers:
                host.see_mirrors(self.mirrors.announced)
            host.see({h.peer: h.machine.hop for h in self.replica_hosts()})

    def _elect(self) -> None:
        """Whoever believes that nobody leads takes a ballot; sometimes wrongly."""
        self.network.after(0.7, self._elect)
        hosts = self.client_hosts()
        for host in hosts:
            others = any(o is not host and o.leads and self.hears(host, o) for o in hosts)
            wrongly = self.network.now_s < FAULTS_END_S and self.network.rng.random() < 0.01
            if self.network.awake(host.peer) and not host.leads and (not others or wrongly):
                host.lead()

    def hears(self, host: ClientHost, other: ClientHost) -> bool:
        """Whether a client knows that another one is there."""
        return self.network.awake(other.peer)

    def _train(self) -> None:
        """Every slot trains one step on a path of replicas that hold the record its client holds."""
        rng = self.network.rng
        self.network.after(0.35, self._train)
        clients = [c for c in self.client_hosts() if c.tip is not None and self.network.awake(c.peer)]
        if not clients:
            return
        usable = [h for h in self.replica_hosts() if h.trains and self.network.awake(h.peer)]
        for slot in range(self.num_slots):
            client = clients[slot % len(clients)]
            path: list[ReplicaHost] = []
            for stage in range(self.num_stages):
                here = [h for h in usable if h.stage == stage and holds(h, client.tip)]
                home = [h for h in here if h.peer.endswith(f".{slot}")]
                if here:
                    path.append(home[0] if home else rng.choice(here))
            if len(path) == self.num_stages:
                self._step(slot, path, self.data)

    def _step(self, slot: int, path: list[ReplicaHost], pool: DataServer) -> None:
        rng = self.network.rng
        sample = pool.lease(path[0].machine.tip.hash)
        self.num_steps += 1
        entry = StepEntry(
            key=StepKey(slot, 1, self.num_steps, 0),
            path=tuple(h.peer for h in path),
            version=len(path[0].log),
            samples=(SampleRange(0, sample, sample + 1),),
            num_samples=1,
            num_targets=1 + sample % 5,
            scale=1.0,
            lr=0.1,
            skipped=False,
        )
        is_doubtful = self.doubt_rate and rng.random() < self.doubt_rate
        doubtful = {h.peer for h in path if rng.random() < 0.5} if is_doubtful else ()
        self.checks.opened(entry.key, path)
        for host in path:
            if host.peer in doubtful:
                host.doubts[entry.key] = entry
            else:
                host.log.append(entry)

    def _close(self) -> None:
        self.network.after(self.round_s, self._close)
        for client in self.client_hosts():
            if self.network.awake(client.peer):
                client.close()

    # -- faults

    def _fallible(self) -> list[str]:
        return [*self.replicas, *self.clients, *self.clients, *self.mirrors.peers]

    def _froze(self, peer: str, duration_s: float) -> None:
        """A process was frozen."""

    def _crash(self, peer: str) -> None:
        """End a process; it starts again, a replica with nothing of what it held, a client with what its disk has."""
        network, rng = self.network, self.network.rng
        host = network.hosts.get(peer)
        loses_power = rng.random() < 0.25
        if isinstance(host, ClientHost):
            self.crash_client(host.peer, loses_power)
        elif isinstance(host, MirrorHost):
            self.mirrors.crash(host.peer)
        elif isinstance(host, ReplicaHost) and self.twin(host) is not None:
            # Not if its stage's state would be gone with it: that is what `_lose_stages` does, where it is bearable.
            network.crash(peer, silently=loses_power)
            self.tell_clients()
            network.after(rng.uniform(0.5, 4.0), self.restart_replica, peer)

    def crash_client(self, peer: PeerId, loses_power: bool) -> None:
        self.network.crash(peer, silently=loses_power)
        if loses_power:
            self.disks[peer].lose_power()
            self.forget(peer)
        self.network.after(self.network.rng.uniform(0.1, 4.0), self.start_client, peer)

    def _lose_stages(self) -> None:
        """All replicas of some stages crash at once, but for some that freeze: as long as the chain stays known."""
        rng = self.network.rng
        stages = rng.sample(range(self.num_stages), rng.choice((1, 1, self.num_stages - 1)))
        victims = [host for host in self.replica_hosts() if host.stage in stages]
        if not self.is_known_without(victims):
            return
        frozen_rate = rng.choice((0.0, 0.5))
        for victim in victims:
            if rng.random() < frozen_rate:
                self.faults.pause(victim.peer, min(rng.uniform(1.0, 14.0), FAULTS_END_S - self.network.now_s))
                continue
            self.network.crash(victim.peer)
            self.network.after(rng.uniform(0.5, 4.0), self.restart_replica, victim.peer)
        self.tell_clients()

    def is_known_without(self, victims: Collection[ReplicaHost]) -> bool:
        """Whether of what these know of the chain nothing is gone with them."""
        others = [host for host in self.replica_hosts() if host not in victims]
        return all(any(_knows_as_much(other, victim) for other in others) for victim in victims)

    def twin(self, host: ReplicaHost) -> ReplicaHost | None:
        """Another replica that has what this one has."""
        machine = host.machine
        for other in self.replica_hosts():
            same_tip = other.machine.tip.hash == machine.tip.hash
            same_prepared = other.machine.prepared == machine.prepared and other.machine.swapping is None
            if other is not host and other.stage == host.stage and same_tip and same_prepared:
                return other
        return None

    def givers(self) -> list[ReplicaHost | Copy]:
        """Who gives away what it holds."""
        mirrored = [copy for mirror in self.mirrors.hosts() for copy in mirror.copies]
        return [*self.replica_hosts(), *mirrored, *self.resumption.copies()]

    def donor_of(self, peer: str, stage: int, digest: str) -> ReplicaHost | Copy | None:
        """Who gives the bytes of a stage in a record away and can be reached."""
        for other in self.givers():
            gives_it = other.stage == stage and other.peer != peer and other.offers == digest
            if gives_it and self.network.awake(other.peer) and not self.network.blocked(peer, other.peer):
                return other
        return None

    def restart_replica(self, peer: PeerId) -> None:
        if peer in self.replicas and peer not in self.network.hosts:
            self._start_again(peer, int(peer[1]))

    def _start_again(self, peer: PeerId, stage: int) -> None:
        """A process starts again; now and then it does not know that there is a run."""
        knows = self.network.rng.random() < 0.8 and any(host.machine.tip.round for host in self.replica_hosts())
        self._start_replica(peer, stage, knows)

    def is_enough(self) -> bool:
        """Whether enough was done after the last fault to be judged."""
        return True

    def run(self) -> int:
        """Run to the end, or until the swarm is split; returns how many rounds were committed.

        Raises:
            Broken: Something that must never happen has happened, or the run does not go on after the last fault.
        """
        try:
            self.network.run(SETTLED_S)
            before = self.newest_round()
            liveness.keeps_going(
                self.network,
                END_S,
                ROUND_LIMIT_S,
                self.newest_round,
                leader=lambda: self.led_under,
                most_changes=len(self.clients),
            )
            liveness.given_time(self.network, LAST_S, self.is_enough)
        except Split:
            self.is_split = True
        else:
            self.mirrors.have_followed(before)
            liveness.nobody_left_behind({h.peer: h.machine.tip.round for h in self.replica_hosts()})
        return self.newest_round()

    def newest_round(self) -> int:
        """The newest round with a committed record."""
        return max(self.chain.committed, default=0)


def _knows_as_much(host: ReplicaHost, other: ReplicaHost) -> bool:
    """Whether of what `other` knows of the chain nothing is gone with it."""
    here, there = host.machine, other.machine
    same = here.tip.hash == there.tip.hash and (there.prepared is None or here.prepared == there.prepared)
    return here.tip.round > there.tip.round or (same and there.swapping is None)
