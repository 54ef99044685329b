"""What must hold of records and of the bytes of stages, checked where each is committed, swapped, given or restored."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tests.simulation.round.hosts import ClientHost, Contribution, ReplicaHost, hashes_of
from tests.simulation.safety import Broken, Process

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.record_chains import is_before
from shoal.swarm.records import outcome_of, record_hash, used_samples
from shoal.swarm.round_effects import Fetch
from shoal.wire.messages.round import (
    Basis,
    CommitRecord,
    Join,
    Propose,
    Record,
    RecordName,
    Resolve,
    Restore,
    SignedRecord,
    StageHashes,
)

if TYPE_CHECKING:
    from tests.simulation.round.mirrors import Copy, MirrorHost
    from tests.simulation.round.world import World

HEARD_S = 1.5
"""Who could be reached for so long, and as long again as slow messages take, has been heard."""
PATIENCE_S = 4.0


def samples_of(record: Record) -> set[int]:
    return {k for item in (*record.samples, *record.skipped) for k in range(item.start, item.stop)}


class Checks:
    """The checks of one world.

    Attributes:
        records: What was committed, by hash.
        base_of: Bytes that were staged, and those that they were trained from.
        made_by: Bytes that were staged, and whose contributions are in them.
        step_hosts: The replicas of each step's path.
        num_restored: How many stages the records name as restored.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.records: dict[str, Record] = {}
        self.base_of: dict[str, str] = {}
        self.made_by: dict[str, frozenset[str]] = {}
        self.step_hosts: dict[StepKey, list[ReplicaHost]] = {}
        self._begun: dict[tuple[StepKey, str], int] = {}
        self._keeps: defaultdict[tuple[PeerId, int, int], set[bool]] = defaultdict(set)
        self._aborted: defaultdict[tuple[PeerId, int], set[tuple[StepKey, PeerId]]] = defaultdict(set)
        self._committed_to: set[tuple[PeerId, str]] = (
            set()
        )  # which replica was told of which record that it is committed
        self.num_restored = 0
        self._resumed: tuple[int, str] | None = None
        self._set_aside: set[str] = set()
        self._swapped_since: set[int] = set()

    def goes_back(self, record: Record, name: str) -> None:
        """Everybody is gone, and the run goes on from this record: there are no later ones any more."""
        chain: dict[str, Record] = {}
        before: Record | None = record
        digest = name
        while before is not None:
            chain[digest] = before
            digest = before.previous
            before = self.records.get(digest)
        self._set_aside = self.records.keys() - chain.keys()
        self.records, self._resumed = chain, (record.round, name)
        self.world.chain.go_back(record.round)
        self.world.samples.recorded = {(0, k) for each in chain.values() for k in samples_of(each)}

    def goes_on(self, who: str, round: int, name: str) -> None:
        """A run that was resumed goes on from the checkpoint: nothing older stands, and nothing that was set aside."""
        if self._resumed is None or self.world.resumption.is_lost:
            return
        since, checkpoint = self._resumed
        if round < since or (round == since and name != checkpoint) or name in self._set_aside:
            raise Broken(f"{who} goes on from record {round}, but the run was resumed from record {since}")

    def _continues(self, record: Record, name: str) -> None:
        """A record of a run that was resumed is the checkpoint's, or follows one that was committed before."""
        if self._resumed is None or self.world.resumption.is_lost or name == self._resumed[1]:
            return
        before = self.records.get(record.previous)
        if before is None:
            raise Broken(f"record {record.round} does not follow the record from which the run was resumed")
        used = used_samples(before)
        if record.recorded != used:
            raise Broken(f"record {record.round} names {record.recorded} for used, the records before have {used}")
        knows = self.world.resumption.tip_of(record.ballot.peer) is not None
        if knows and record.previous == self._resumed[1] and record.ballot <= before.ballot:
            raise Broken(f"record {record.round} has the ballot {record.ballot}, the one before has {before.ballot}")

    def opened(self, key: StepKey, hosts: list[ReplicaHost]) -> None:
        """A step is tried over these replicas."""
        self.step_hosts[key] = hosts
        for host in hosts:
            self._begun[key, host.peer] = host.begun.get(host.machine.round, 0)

    def says(self, replica: PeerId, message: object) -> None:
        """A client tells a replica, or is told by it, that a step is aborted there: that stays so for this client. Or
        it says which record is committed."""
        match message:
            case Resolve(ballot, _, key, False):
                self._aborted[ballot.peer, ballot.generation].add((key, replica))
            case CommitRecord(known=RecordName(record_hash=digest)):
                self._committed_to.add((replica, digest))
            case CommitRecord(record=SignedRecord() as signed) | Restore(record=signed):
                self._committed_to.add((replica, record_hash(signed)))
            case Join(ballot):
                self._aborted[ballot.peer, ballot.generation].update((key, replica) for key in message.aborted)
            case _:
                pass

    def closes(self, ballot: Ballot, round: int, keep: bool) -> None:
        """A client ends a round, of whose record it wants a checkpoint or not; its next ballot goes on with that."""
        self._keeps[ballot.peer, ballot.generation, round].add(keep)

    def committed(self, record: Record, signed: SignedRecord) -> None:
        """A record is committed, for the first time or again."""
        name = record_hash(signed)
        self.goes_on(record.ballot.peer, record.round, name)
        self._continues(record, name)
        self.belongs(record, name)
        if record.keep not in self._keeps[record.ballot.peer, record.ballot.generation, record.round]:
            raise Broken(f"record {record.round} says of a checkpoint what its client did not")
        logs = self.world.disks[record.ballot.peer].read(name)
        if logs is None:
            raise Broken(f"the steps of record {record.round} are known to nobody any more")
        self.records[name] = record
        self._bases(record)
        entries = {entry.key.step: entry for _, log in logs.values() for entry in log}
        trained = [item.start for entry in entries.values() for item in entry.samples]
        if len(trained) != len(set(trained)):
            raise Broken(f"two steps of record {record.round} have trained on the same samples: {sorted(trained)}")
        if set(trained) != samples_of(record):
            raise Broken(f"record {record.round} does not name what its members have trained")
        keys = {peer: {entry.key for entry in log} for peer, (_, log) in logs.items()}
        torn: list[tuple[StepKey, str]] = []
        for key in set[StepKey]().union(*keys.values()):
            for host in self.step_hosts[key]:
                is_final = host.peer in logs and self.world.network.hosts.get(host.peer) is host
                # One whose stage was restored, or found, since has begun the round anew without it.
                is_final = is_final and host.begun.get(record.round, 0) == self._begun[key, host.peer]
                if is_final and key not in keys[host.peer]:
                    torn.append((key, host.peer))
        self._torn(record, keys, torn)

    def _torn(self, record: Record, keys: Mapping[str, set[StepKey]], torn: Sequence[tuple[StepKey, str]]) -> None:
        """Steps that some member has committed and another one has aborted: one of the two had to be left out.

        But for the last of a stage: where all its members contradict others, the stage cannot do without them. These
        others may be members, or have gone since they were told of a step's fate.
        """
        aborted = self._aborted[record.ballot.peer, record.ballot.generation]
        disputed = {key for key, _ in torn} | {key for key, peer in aborted if peer not in keys}
        contradicting = {peer for peer in keys if keys[peer] & disputed} | {peer for _, peer in torn}
        needed = {
            peer for outcome in record.stages if contradicting.issuperset(outcome.members) for peer in outcome.members
        }
        for key, aborter in torn:
            holders = {peer for peer in keys if key in keys[peer]}
            if aborter not in needed and not holders <= needed:
                raise Broken(f"step {key} is in record {record.round}, but {aborter} has aborted it")

    def belongs(self, record: Record, name: str) -> None:
        """A record goes on from what was committed before, and names no sample again."""
        if self.world.chain.commits(record.round, name, self._members_of(record), record.ballot):
            self.world.samples.record((*record.samples, *record.skipped))

    def follows(self, host: ReplicaHost, record: Record, signed: SignedRecord) -> None:
        """A replica swaps to a record."""
        who, members = self._process(host.peer), self._members_of(record)
        self.world.chain.swaps(who, record.round, record_hash(signed), members, record.ballot)

    def _members_of(self, record: Record) -> set[Process]:
        return {self._process(peer) for outcome in record.stages for peer in outcome.members}

    def _process(self, peer: str) -> Process:
        return Process(peer, self.world.network.boots[peer])

    def is_heard(self, ballot: object, process: Process) -> bool:
        """Whether the coordinator of this ballot has heard a process that lives, or was bound to."""
        network = self.world.network
        if not isinstance(ballot, Ballot) or network.boots[process.peer] != process.boot:
            return False
        coordinator = network.hosts.get(ballot.peer)
        if not isinstance(coordinator, ClientHost) or coordinator.generation() != ballot.generation:
            return False  # its process has ended
        heard_s = HEARD_S + 2 * network.manners.slow_s
        return network.reachable(ballot.peer, process.peer, network.now_s - heard_s, network.now_s)

    def _bases(self, record: Record) -> None:
        """A record says of each stage what it was trained from."""
        before = self.records.get(record.previous)
        for outcome in record.stages:
            if outcome.hashes.parameters not in self.base_of:
                raise Broken(f"record {record.round} is committed before anybody has made the bytes of {outcome.stage}")
            base = self.base_of[outcome.hashes.parameters]
            previous = None if before is None else outcome_of(before, outcome.stage)
            starts = {self.world.start_of(peer, outcome.stage) for peer in outcome.members}
            own = starts if previous is None else {previous.hashes.parameters}
            named = own if outcome.restored is None else {outcome.restored.hashes.parameters}
            if self.made_by[outcome.hashes.parameters] != frozenset(outcome.members):
                raise Broken(f"record {record.round} does not name those who made the bytes of stage {outcome.stage}")
            if base not in named:
                raise Broken(f"record {record.round} does not say what stage {outcome.stage} was trained from")
            if outcome.restored is not None:
                self.num_restored += 1
                if named == own:
                    raise Broken(f"record {record.round} restores stage {outcome.stage} from the record before")

    def ring(self, host: ReplicaHost, peers: list[PeerId], parts: list[Contribution]) -> None:
        """A ring of these members has ended with these contributions."""
        if {quorum for _, _, quorum in parts} != {tuple(peers)}:
            raise Broken(f"the ring of {host.peer} mixes frames of several quorums")
        if len({basis for _, basis, _ in parts}) > 1:
            raise Broken(f"the ring of {host.peer} mixes what was trained from different bytes")

    def gift(self, donor: ReplicaHost | Copy, order: Fetch) -> None:
        """A replica or a mirror gives its bytes away."""
        if hashes_of(donor.theta) != order.hashes:
            raise Broken(f"{donor.peer} gives other bytes than those of record {order.record.round}")

    def begins(self, client: ClientHost) -> None:
        """A client trains from D_0, or from a checkpoint that no replica held when it began to lead: every mirror that
        holds what is newer was waited for, and has not been heard since."""
        tip, now_s = client.machine.tip, self.world.network.now_s
        self.goes_on(client.peer, tip.round, tip.hash)
        is_resumed = self._resumed is not None and tip.hash == self._resumed[1]
        replicas = self.world.replica_hosts()
        is_held = any(host.machine.tip.hash == tip.hash and host.swapped_s < client.led_s for host in replicas)
        is_first = tip.signed is None or (is_resumed and not is_held)
        for mirror in self.world.mirrors.hosts() if is_first else ():
            newer = (stage for stage, held in mirror.machine.held.items() if is_before(tip, held, self.world.unseal))
            held_s = min((mirror.since_s[stage] for stage in newer), default=math.inf)
            known_s = max(held_s, self.world.mirrors.announced_since(mirror.peer))
            was_waited_for = client.led_s <= known_s or now_s - client.led_s >= PATIENCE_S - 0.5
            if not was_waited_for or self._hears(client, mirror, held_s):
                what = f"record {tip.round}, but {mirror.peer} holds newer ones"
                raise Broken(f"{client.peer} begins with {what} and was there just now")

    def proposed(self, client: ClientHost, quorum: Propose) -> None:
        """A stage is averaged on restored bytes: no mirror that holds the record's own has been heard for a while. Who
        comes after the first proposal comes too late."""
        if quorum.epoch:
            return
        hosts = [self.world.network.hosts.get(hop.peer) for hop in quorum.members]
        if not any(isinstance(host, ReplicaHost) and host.machine.is_restored for host in hosts):
            return
        for mirror in self.world.mirrors.hosts():
            held, since_s = mirror.machine.held.get(quorum.stage), mirror.since_s.get(quorum.stage, math.inf)
            if held is not None and held.hash == client.machine.tip.hash and self._hears(client, mirror, since_s):
                raise Broken(f"stage {quorum.stage} is averaged on restored bytes, but {mirror.peer} holds its own")

    def _hears(self, client: ClientHost, mirror: MirrorHost, held_s: float) -> bool:
        """Whether a client can know what a mirror holds since `held_s`: the mirror answers whose ballot is highest."""
        network = self.world.network
        if mirror.machine.promised > client.machine.ballot:
            return False
        start_s = network.now_s - HEARD_S - 2 * network.manners.slow_s
        is_announced = self.world.mirrors.announced_since(mirror.peer) <= start_s
        return (
            is_announced and held_s <= start_s and network.reachable(client.peer, mirror.peer, start_s, network.now_s)
        )

    def restored(self, client: ClientHost, stage: int, basis: Basis) -> None:
        """A stage is restored: whoever has its bytes has not been heard for a while. A client that takes over goes on
        with what others have restored, and cannot know whom they have heard."""
        self._none_is_mirrored(client, stage, basis)
        self._none_is_kept(client, stage, basis)
        network = self.world.network
        heard_s = HEARD_S + 2 * network.manners.slow_s
        now_s, tip = network.now_s, client.machine.tip
        record = self.world.unseal(tip.signed) if tip.signed is not None else None
        outcome = None if record is None else outcome_of(record, stage)
        for host in self.world.replica_hosts():
            has_bytes = host.stage == stage and outcome is not None and hashes_of(host.theta) == outcome.hashes
            begun_s = client.led_s if self._is_restored(client, stage, basis) else -math.inf
            starts_s = [now_s - PATIENCE_S + 0.5 + 0.25 * k for k in range(int((PATIENCE_S - 0.5 - heard_s) * 4) + 1)]
            for start_s in starts_s:
                can_talk = network.reachable(client.peer, host.peer, start_s, start_s + heard_s)
                if has_bytes and can_talk and max(host.swapped_s, begun_s) <= start_s:
                    raise Broken(f"stage {stage} is restored, but {host.peer} has its bytes and was there just now")

    def _none_is_mirrored(self, client: ClientHost, stage: int, basis: Basis) -> None:
        """Nor does a mirror, that could be heard, hold newer ones than those that the stage goes on from, which a
        replica that could be heard might have fetched."""
        network, tip = self.world.network, client.machine.tip
        there = [host for host in self.world.replica_hosts() if host.stage == stage]
        if self._is_restored(client, stage, basis):
            return
        for mirror in self.world.mirrors.hosts():
            held = mirror.machine.held.get(stage)
            if held is None or not self._hears(client, mirror, mirror.since_s[stage]):
                continue
            start_s = network.now_s - HEARD_S - 2 * network.manners.slow_s
            is_taker = any(
                network.reachable(client.peer, host.peer, start_s, network.now_s)
                and is_before(host.machine.tip, held, self.world.unseal)
                for host in there
            )
            is_newer = is_before(held, tip, self.world.unseal) and held.round > basis.round
            if held.hash == tip.hash or (is_newer and is_taker):
                raise Broken(
                    f"stage {stage} is restored from record {basis.round}, but {mirror.peer} holds {held.round} of it"
                )

    def _none_is_kept(self, client: ClientHost, stage: int, basis: Basis) -> None:
        """Nor does the client itself keep what is newer: the checkpoint's bytes, until a replica has swapped others."""
        keeping = self.world.resumption.keeping_of(client)
        if keeping is None or stage in self._swapped_since or self._is_restored(client, stage, basis):
            return
        since = keeping.checkpoint.tip.round
        if basis.round < since:
            raise Broken(f"stage {stage} is restored from record {basis.round}, its client has it of record {since}")

    def _is_restored(self, client: ClientHost, stage: int, basis: Basis) -> bool:
        """Whether a stage was restored before, by another client or an earlier start."""
        hosts = [host for host in self.world.replica_hosts() if host.stage == stage]
        return any(host.machine.tip.hash == client.machine.tip.hash and host.machine.basis == basis for host in hosts)

    def swap(self, host: ReplicaHost, record: Record, hashes: StageHashes) -> None:
        """A replica makes these bytes its state."""
        outcome = outcome_of(record, host.stage)
        bytes_there = host.staged.get(hashes, host.theta)
        is_own = bytes_there == host.theta and hashes == hashes_of(host.theta)
        if outcome is None or (not is_own and outcome.hashes != hashes_of(bytes_there)):
            raise Broken(f"{host.peer} swaps bytes that are not those of record {record.round}")
        if host.machine.swapping is None:
            raise Broken(f"{host.peer} swaps to record {record.round}, and its machine does not know")
        if (host.peer, record_hash(host.machine.swapping)) not in self._committed_to:
            raise Broken(f"{host.peer} swaps to record {record.round}, and nobody has told it that this is committed")
        self.goes_on(host.peer, record.round, record_hash(host.machine.swapping))
        if self._resumed is not None and record.round > self._resumed[0]:
            self._swapped_since.add(host.stage)
        self.follows(host, record, host.machine.swapping)
        own = {k for entry in host.log for item in entry.samples for k in [item.start]}
        # One that was started again since, or restored, or comes from another chain, drops what it has trained, as one
        # that was left out does. One that was started again has not averaged the bytes of the record itself.
        is_restored = outcome.hashes != hashes or hashes not in host.averaged
        drops = host.machine.tip.hash != record.previous or is_restored
        has_joined = host.machine.joined is not None and not drops
        if host.peer in outcome.members and has_joined and not own <= samples_of(record):
            raise Broken(f"steps that {host.peer} has committed are not in record {record.round}")
