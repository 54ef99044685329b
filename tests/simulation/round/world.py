"""A run of the outer rounds under faults: who exists, what goes wrong when, and what must hold after every event."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.round.hosts import ClientHost, ReplicaHost, digest, hashes_of, holds
from tests.simulation.round.network import Network

from shoal.ids import PeerId, StepKey
from shoal.swarm.records import Logs, outcome_of, record_hash, seal, unseal
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Fetch
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_settings import RoundSettings
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import Decide, Hold, Record, SignedRecord, StageHashes
from shoal.wire.messages.step import StepEntry

GENESIS = "genesis"
PATIENCE_S = 4.0
HEARD_S = 1.5
"""Who could be reached for so long has been heard."""
LAST_FAULT_S = 30.0
END_S = 60.0


class Broken(AssertionError):
    """Something that must never happen has happened."""


class DataServer:
    """Gives out samples 0, 1, 2, ...; outlives its client. What is in no record of its round becomes free again."""

    def __init__(self) -> None:
        self.recorded: set[int] = set()
        self._given: set[int] = set()
        self._round = 0

    def lease(self) -> int:
        sample = next(k for k in range(10**6) if k not in self.recorded and k not in self._given)
        self._given.add(sample)
        return sample

    def record(self, record: Record) -> None:
        if record.round > self._round:
            self._round = record.round
            self.recorded.update(samples_of(record))
            self._given.clear()

    def recorded_ranges(self) -> tuple[SampleRange, ...]:
        return tuple(SampleRange(0, k, k + 1) for k in sorted(self.recorded))


def samples_of(record: Record) -> set[int]:
    return {k for item in record.samples for k in range(item.start, item.stop)}


class World:
    """One seeded run.

    Args:
        seed: Decides everything.
        member_class, coordinator_class: The machines, or mutants of them.
        faults: Whether anything goes wrong.
    """

    def __init__(
        self,
        seed: int,
        member_class: type[RoundMemberMachine] = RoundMemberMachine,
        coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine,
        faults: bool = True,
    ) -> None:
        self.network = Network(seed)
        rng = self.network.rng
        self.member_class, self.coordinator_class = member_class, coordinator_class
        self.num_stages, num_slots = rng.choice((2, 3)), rng.choice((1, 2, 2, 3))
        self.settings = RoundSettings("sim", self.num_stages, GENESIS, 0.3, 8.0, 4.0, PATIENCE_S)
        self.flip_rate = rng.choice((0.0, 0.0, 0.02)) if faults else 0.0
        self.doubt_rate = rng.choice((0.0, 0.2)) if faults else 0.0
        self.sabotage = (
            [rng.randint(1, 60), rng.choice((0.0, 0.0, 3.0, 6.0))] if faults and rng.random() < 0.6 else None
        )
        self.data = DataServer()
        self.decided: dict[int, str] = {}
        self.disks: dict[tuple[PeerId, str], Logs] = {}  # what each client has journaled, over all its starts
        self.records: dict[int, Record] = {}
        self.base_of: dict[str, str] = {}  # bytes that were staged, and those that they were trained from
        self.num_restored = 0
        self.num_steps = 0
        self.step_hosts: dict[StepKey, list[ReplicaHost]] = {}
        self.replicas = [PeerId(f"R{stage}.{slot}") for stage in range(self.num_stages) for slot in range(num_slots)]
        self.clients = [PeerId(f"C{number}") for number in range(rng.choice((1, 2, 2)))]
        self.num_slots = num_slots
        for peer in self.replicas:
            stage = int(peer[1])
            self._start_replica(peer, ReplicaHost(self, peer, stage))
        for peer in self.clients:
            self._start_client(peer)
        self.network.after(0.5, self._train)
        self.network.after(2.5, self._close)
        self.network.after(0.3, self._elect)
        for _ in range(rng.randint(1, 8) if faults else 0):
            self.network.after(rng.uniform(1.0, LAST_FAULT_S - 8.0), self._fault)

    # -- what runs

    def hosts(self) -> list[ReplicaHost]:
        return [h for p in self.replicas if isinstance(h := self.network.hosts.get(p), ReplicaHost)]

    def client_hosts(self) -> list[ClientHost]:
        return [h for p in self.clients if isinstance(h := self.network.hosts.get(p), ClientHost)]

    def seal_as(self, peer: PeerId) -> Callable[[Record], SignedRecord]:
        return lambda record: seal(record, peer, lambda body: body[:8])

    def unseal(self, signed: SignedRecord) -> Record:
        return unseal(signed, "sim", lambda _peer, _body, _signature: None)

    def send(self, sender: str, receiver: str, message: object) -> None:
        """Send; now and then the coordinator crashes right between two sends of one decision."""
        if self.network.hosts.get(sender) is None:
            return
        self.network.send(sender, receiver, message)
        if self.sabotage is not None and sender in self.clients and isinstance(message, Hold | Decide):
            self.sabotage[0] -= 1
            if self.sabotage[0] == 0 and self.network.now_s < LAST_FAULT_S - 8.0:
                if self.sabotage[1]:
                    self.network.pause(receiver, self.sabotage[1])
                self._crash_client(PeerId(sender))

    def _start_replica(self, peer: PeerId, host: ReplicaHost) -> None:
        self.network.start(peer, host)
        self._tell_clients()

    def _start_client(self, peer: PeerId) -> None:
        host = ClientHost(self, peer, self.network.boots.get(peer, 0) + 1)
        self.network.start(peer, host)
        host.see({h.peer: h.machine.hop for h in self.hosts()})

    def _tell_clients(self) -> None:
        for client in self.clients:
            if client in self.network.hosts:
                self.network.on_host(client, 0.05, lambda c=client: self._see(c))

    def _see(self, client: PeerId) -> None:
        host = self.network.hosts.get(client)
        if isinstance(host, ClientHost):
            host.see({h.peer: h.machine.hop for h in self.hosts()})

    def _elect(self) -> None:
        """Whoever believes that nobody leads takes a ballot; sometimes wrongly."""
        self.network.after(0.7, self._elect)
        for host in self.client_hosts():
            others = [o for o in self.client_hosts() if o is not host and o.leads and self.network.awake(o.peer)]
            wrongly = self.network.now_s < LAST_FAULT_S and self.network.rng.random() < 0.01
            if self.network.awake(host.peer) and not host.leads and (not others or wrongly):
                host.lead()

    def _train(self) -> None:
        """Every slot trains one step on a path of replicas that hold the record its client holds."""
        rng = self.network.rng
        self.network.after(0.35, self._train)
        for slot in range(self.num_slots):
            clients = [c for c in self.client_hosts() if c.tip is not None and self.network.awake(c.peer)]
            if not clients:
                return
            client = clients[slot % len(clients)]
            path: list[ReplicaHost] = []
            for stage in range(self.num_stages):
                usable = [
                    h
                    for h in self.hosts()
                    if h.stage == stage and h.trains and holds(h, client.tip) and self.network.awake(h.peer)
                ]
                home = [h for h in usable if h.peer.endswith(f".{slot}")]
                if usable:
                    path.append(home[0] if home else rng.choice(usable))
            if len(path) == self.num_stages:
                self._step(slot, path)

    def _step(self, slot: int, path: list[ReplicaHost]) -> None:
        rng = self.network.rng
        sample = self.data.lease()
        self.num_steps += 1
        entry = StepEntry(
            key=StepKey(slot, 1, self.num_steps, 0),
            path=tuple(h.peer for h in path),
            version=len(path[0].log),
            samples=(SampleRange(0, sample, sample + 1),),
            num_samples=1,
            scale=1.0,
            lr=0.1,
            skipped=False,
        )
        doubtful = {h.peer for h in path if rng.random() < 0.5} if rng.random() < self.doubt_rate else set[PeerId]()
        self.step_hosts[entry.key] = path
        for host in path:
            if host.peer in doubtful:
                host.doubts[entry.key] = entry
            else:
                host.log.append(entry)

    def _close(self) -> None:
        self.network.after(2.5, self._close)
        for client in self.client_hosts():
            if self.network.awake(client.peer):
                client.close()

    # -- faults

    def _fault(self) -> None:
        rng = self.network.rng
        kind = rng.random()
        if kind < 0.15:
            self._lose_stages(rng.sample(range(self.num_stages), rng.choice((1, 1, self.num_stages - 1))))
        elif kind < 0.35:
            self._crash_replica(rng.choice(self.replicas))
        elif kind < 0.5:
            self._crash_client(rng.choice(self.clients))
        elif kind < 0.65:
            self._pause(rng.choice(self.replicas), rng.uniform(0.5, 5.0))
        elif kind < 0.8:
            self._pause(rng.choice(self.clients), rng.uniform(0.5, 5.0))
        else:
            first, second = rng.sample([*self.replicas, *self.clients], 2)
            self.network.cut(first, second, rng.choice((0.0, rng.uniform(0.1, 3.0))))

    def _pause(self, peer: PeerId, duration_s: float) -> None:
        if peer in self.network.hosts:
            self.network.pause(peer, duration_s)

    def _crash_client(self, peer: PeerId) -> None:
        if peer in self.network.hosts:
            self.network.crash(peer)
            self.network.after(self.network.rng.uniform(0.5, 4.0), lambda: self._start_client(peer))

    def _crash_replica(self, peer: PeerId) -> None:
        """Crash a replica, unless its stage's state would be gone with it: nobody can go on from that."""
        host = self.network.hosts.get(peer)
        if isinstance(host, ReplicaHost) and self._twin(host) is not None:
            self.network.crash(peer)
            self._tell_clients()
            self.network.after(self.network.rng.uniform(0.5, 4.0), lambda: self._restart_replica(peer))

    def _lose_stages(self, stages: list[int]) -> None:
        """All replicas of some stages crash at once, but for some that freeze: as long as the chain stays known."""
        rng = self.network.rng
        victims = [host for host in self.hosts() if host.stage in stages]
        others = [host for host in self.hosts() if host.stage not in stages]
        if not all(any(_knows_as_much(other, victim) for other in others) for victim in victims):
            return
        frozen_rate = rng.choice((0.0, 0.5))
        for victim in victims:
            if rng.random() < frozen_rate:
                self._pause(victim.peer, rng.uniform(1.0, 14.0))
                continue
            self.network.crash(victim.peer)
            self.network.after(rng.uniform(0.5, 4.0), lambda peer=victim.peer: self._restart_replica(peer))
        self._tell_clients()

    def _twin(self, host: ReplicaHost) -> ReplicaHost | None:
        machine = host.machine
        for other in self.hosts():
            same_tip = other.machine.tip.hash == machine.tip.hash
            same_pending = other.machine.pending == machine.pending and other.machine.swapping is None
            if other is not host and other.stage == host.stage and same_tip and same_pending:
                return other
        return None

    def donor_for(self, host: ReplicaHost, digest: str) -> ReplicaHost | None:
        """A replica of the same stage that holds a record and can be reached."""
        for other in self.hosts():
            holds_it = other.stage == host.stage and other is not host and other.offers == digest
            if holds_it and self.network.awake(other.peer) and not self.network.blocked(host.peer, other.peer):
                return other
        return None

    def _restart_replica(self, peer: PeerId) -> None:
        """A process starts again, with nothing of what it held; now and then it does not know that there is a run."""
        knows = self.network.rng.random() < 0.8 and any(host.machine.tip.round for host in self.hosts())
        self._start_replica(peer, ReplicaHost(self, peer, int(peer[1]), knows))

    # -- what must hold

    def check_decided(self, record: Record, signed: SignedRecord) -> None:
        logs = self.disks.get((record.ballot.peer, record_hash(signed)))
        if logs is None:
            raise Broken(f"the steps of record {record.round} are known to nobody any more")
        if self.decided.setdefault(record.round, record_hash(signed)) != record_hash(signed):
            raise Broken(f"two records of round {record.round}")
        if self.data._round < record.round and samples_of(record) & self.data.recorded:
            raise Broken(f"samples of record {record.round} were recorded before")
        self.records[record.round] = record
        self._check_bases(record)
        trained = [k for _, log in logs.values() for entry in log for item in entry.samples for k in [item.start]]
        if set(trained) != samples_of(record):
            raise Broken(f"record {record.round} does not name what its members have trained")
        held = {entry.key for _, log in logs.values() for entry in log}
        for key in held:
            for host in self.step_hosts[key]:
                is_final = host.peer in logs and self.network.hosts.get(host.peer) is host
                if is_final and key not in {entry.key for entry in logs[host.peer][1]}:
                    raise Broken(f"step {key} is in record {record.round}, but {host.peer} has aborted it")

    def _check_bases(self, record: Record) -> None:
        """A record says of each stage what it was trained from."""
        before = self.records.get(record.round - 1)
        for outcome in record.stages:
            base = self.base_of[outcome.hashes.parameters]
            previous = None if before is None else outcome_of(before, outcome.stage)
            own = digest("initial", outcome.stage) if previous is None else previous.hashes.parameters
            named = own if outcome.restored is None else outcome.restored.hashes.parameters
            if base != named:
                raise Broken(f"record {record.round} does not say what stage {outcome.stage} was trained from")
            if outcome.restored is not None:
                self.num_restored += 1
                if named == own:
                    raise Broken(f"record {record.round} restores stage {outcome.stage} from the record before")

    def check_ring(self, host: ReplicaHost, bases: set[str]) -> None:
        if len(bases) > 1:
            raise Broken(f"the ring of {host.peer} mixes what was trained from different bytes")

    def check_gift(self, donor: ReplicaHost, order: Fetch) -> None:
        if hashes_of(donor.theta) != order.hashes:
            raise Broken(f"{donor.peer} gives other bytes than those of record {order.record.round}")

    def check_restored(self, client: ClientHost, stage: int) -> None:
        """Whoever has the bytes has not been heard for a while."""
        now_s, tip = self.network.now_s, client.machine.tip
        record = self.unseal(tip.signed) if tip.signed is not None else None
        outcome = None if record is None else outcome_of(record, stage)
        for host in self.hosts():
            has_bytes = host.stage == stage and outcome is not None and hashes_of(host.theta) == outcome.hashes
            starts_s = [now_s - PATIENCE_S + 0.5 + 0.25 * k for k in range(int((PATIENCE_S - 0.5 - HEARD_S) * 4) + 1)]
            for start_s in starts_s:
                can_talk = self.network.reachable(client.peer, host.peer, start_s, start_s + HEARD_S)
                if has_bytes and can_talk and host.swapped_s <= start_s:
                    raise Broken(f"stage {stage} is restored, but {host.peer} has its bytes and was there just now")

    def check_swap(self, host: ReplicaHost, record: Record, hashes: StageHashes) -> None:
        outcome = outcome_of(record, host.stage)
        bytes_there = host.staged.get(hashes, host.theta)
        is_own = bytes_there == host.theta and hashes == hashes_of(host.theta)
        if outcome is None or (not is_own and outcome.hashes != hashes_of(bytes_there)):
            raise Broken(f"{host.peer} swaps bytes that are not those of record {record.round}")
        if self.decided.get(record.round) not in (
            None,
            record_hash(host.machine.swapping or SignedRecord(b"", "", b"")),
        ):
            raise Broken(f"{host.peer} swaps to another record of round {record.round}")
        own = {k for entry in host.log for item in entry.samples for k in [item.start]}
        # One that was started again since, and restored, drops what it has trained, as one that was left out does.
        is_restored = host.machine.tip.round == record.round or outcome.hashes != hashes
        if host.peer in outcome.members and not is_restored and not own <= samples_of(record):
            raise Broken(f"steps that {host.peer} has committed are not in record {record.round}")

    def check_safe(self) -> None:
        """What must hold after every event."""
        tips: dict[int, str] = {}
        for host in self.hosts():
            tip = host.machine.tip
            if tips.setdefault(tip.round, tip.hash) != tip.hash:
                raise Broken(f"two chains at round {tip.round}")
            if tip.round and self.decided.get(tip.round, tip.hash) != tip.hash:
                raise Broken(f"{host.peer} holds another record {tip.round} than was decided")

    def run(self) -> int:
        """Run to the end; returns how many rounds were decided.

        Raises:
            Broken: Something that must never happen has happened, or the run does not go on after the last fault.
        """
        self.network.run_until(LAST_FAULT_S + 5.0, self.check_safe)
        before = max(self.decided, default=0)
        self.network.run_until(END_S, self.check_safe)
        rounds = [h.machine.tip.round for h in self.hosts()]
        if max(self.decided, default=0) < before + 2:
            raise Broken(f"no progress after round {before}")
        if max(rounds) - min(rounds) > 1:
            raise Broken(f"a replica was left behind: {rounds}")
        return max(self.decided)


def _knows_as_much(host: ReplicaHost, other: ReplicaHost) -> bool:
    """Whether of what `other` knows of the chain nothing is gone with it."""
    here, there = host.machine, other.machine
    same = here.tip.hash == there.tip.hash and (there.pending is None or here.pending == there.pending)
    return here.tip.round > there.tip.round or (same and there.swapping is None)
