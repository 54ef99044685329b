"""What must hold of chains of records: each alone is a run, the right one is chosen, and in the end there is one."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.simulation.round.checks import HEARD_S, Checks, samples_of
from tests.simulation.round.hosts import ClientHost, ReplicaHost, hashes_of
from tests.simulation.safety import Broken

from shoal.ids import Ballot, PeerId
from shoal.swarm.record_chains import is_before
from shoal.swarm.records import Tip, outcome_of, record_hash, used_samples
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import ChainLeft
from shoal.swarm.sample_ranges import count
from shoal.wire.messages.round import CommitRecord, Record, Restore, SignedRecord

if TYPE_CHECKING:
    from tests.simulation.split.world import SplitWorld

WAITS_S = 6.0
"""A chain that is not whole is waited for longer than this."""


class SplitChecks(Checks):
    """The checks of one world."""

    world: SplitWorld

    def __init__(self, world: SplitWorld) -> None:
        super().__init__(world)
        self._there: dict[tuple[Ballot, PeerId], set[PeerId]] = {}
        self._told: defaultdict[RoundCoordinatorMachine, list[Tip]] = defaultdict(list)

    def says(self, replica: PeerId, message: object) -> None:
        """Who could be heard when a replica was first told, under a ballot, of the chain that was chosen."""
        super().says(replica, message)
        if isinstance(message, CommitRecord | Restore):
            network, client = self.world.network, message.ballot.peer
            hosts = [host.peer for host in self.world.replica_hosts()]
            there = {peer for peer in hosts if network.awake(peer) and not network.blocked(client, peer)}
            self._there.setdefault((message.ballot, replica), there)

    def belongs(self, record: Record, name: str) -> None:
        used: set[int] = set()
        for before in self.chain_before(record):
            used |= samples_of(before)
        if used & samples_of(record):
            raise Broken(f"record {record.round} names samples again: {sorted(used & samples_of(record))}")
        recorded = {number for item in record.recorded for number in range(item.start, item.stop)}
        if recorded != used:
            raise Broken(f"record {record.round} does not name the samples of its own chain: {sorted(recorded ^ used)}")

    def chain_before(self, record: Record) -> list[Record]:
        """The records before this one, newest first."""
        chain: list[Record] = []
        while (before := self.records.get(record.previous)) is not None:
            chain.append(before)
            record = before
        if record.round != 1:
            raise Broken(f"nobody has said that record {record.round - 1} is committed")
        return chain

    def follows(self, host: ReplicaHost, record: Record, signed: SignedRecord) -> None:
        tip, unseal = host.machine.tip, self.world.unseal
        if hashes_of(host.theta) != host.machine.basis.hashes:
            raise Broken(f"{host.peer} had dropped its state before it had that of record {record.round}")
        if not is_before(tip, self.world.tip_of(signed), unseal) and record_hash(signed) != tip.hash:
            # What it has trained is lost to its stage, also if it comes back to this chain.
            for path in self.step_hosts.values():
                path[:] = [other for other in path if other is not host]
        if tip.signed is not None and record_hash(signed) != tip.hash:
            before = self.chain_before(unseal(tip.signed))
            if record_hash(signed) in {record.previous for record in (unseal(tip.signed), *before)}:
                raise Broken(f"{host.peer} goes back from record {tip.round} to record {record.round} of its own chain")

    def leaves(self, host: ReplicaHost, record: Record) -> None:
        """A replica leaves its record for that of another chain: not if its own one had to be chosen."""
        network, tip, unseal = self.world.network, host.machine.tip, self.world.unseal
        signed = host.machine.fetching
        if tip.signed is None or signed is None or is_before(tip, self.world.tip_of(signed), unseal):
            return
        if record_hash(signed) == tip.hash:
            return  # other bytes of the same record: its stage was restored, and a holder of the record's own is back
        chooser = network.hosts.get(host.machine.promised.peer)
        is_there = isinstance(chooser, ClientHost) and chooser.machine.ballot == host.machine.promised
        if is_there and not chooser.machine._judgement.is_held(tip):
            raise Broken(f"{host.peer} leaves record {tip.round}, which {chooser.peer} has not judged")
        if count(used_samples(record)) >= count(used_samples(unseal(tip.signed))):
            return
        client, now_s = host.machine.promised.peer, network.now_s
        since_s = now_s - HEARD_S - 2 * network.manners.slow_s
        holders = [other for other in self.world.replica_hosts() if other.machine.tip.hash == tip.hash]
        heard = [
            other
            for other in holders
            if other.swapped_s <= since_s and network.reachable(client, other.peer, since_s, now_s)
        ]
        # Of a chain that nobody was heard of for so long, its other holders were to be waited for.
        is_new = not any(network.reachable(client, other.peer, now_s - WAITS_S, now_s) for other in holders)
        if is_new:
            heard = [other for other in holders if other.peer in self._there[host.machine.promised, host.peer]]
        if host in heard and {other.stage for other in heard} == set(range(self.world.num_stages)):
            raise Broken(f"{host.peer} leaves record {tip.round}, whose chain has more samples and is whole")

    def tells(self, client: RoundCoordinatorMachine, chain: ChainLeft) -> None:
        """A client says that a chain is left: once, also if that grows until all of its holders have heard it.

        But of a chain that has parted meanwhile, each branch may be left.
        """
        left = chain.left
        followers = Counter(record.previous for record in self.records.values())
        for told in self._told[client]:
            older, newer = sorted((told, left), key=lambda tip: tip.round)
            # By hashes: of two first records of one ballot, the later ones of both chains name the same eras.
            line = self._line(newer)
            is_parted = any(followers[digest] > 1 for digest in line[1 : newer.round - older.round + 1])
            if older.hash in line and not is_parted:
                raise Broken(f"record {told.round} was told to be left, and then {left.round} of the same chain")
        self._told[client].append(left)

    def _line(self, tip: Tip) -> list[str]:
        """The hashes of a record and of those before it, newest first, as far as the world has heard of them."""
        line = [tip.hash]
        while (record := self.records.get(line[-1])) is not None:
            line.append(record.previous)
        return line

    def one_chain(self) -> list[Record]:
        """All replicas are on one chain, each with the bytes that it names; returns its records, newest first."""
        hosts, unseal = self.world.replica_hosts(), self.world.unseal
        newest = max((host.machine.tip for host in hosts), key=lambda tip: tip.round)
        if newest.signed is None:
            raise Broken("nothing was committed")
        chain = [unseal(newest.signed), *self.chain_before(unseal(newest.signed))]
        names = {newest.hash, *(record.previous for record in chain)}
        for host in hosts:
            tip = host.machine.tip
            if tip.hash not in names:
                raise Broken(f"{host.peer} is on another chain, at record {tip.round}")
            outcome = None if tip.signed is None else outcome_of(unseal(tip.signed), host.stage)
            if outcome is not None and not host.machine.is_restored and outcome.hashes != hashes_of(host.theta):
                raise Broken(f"{host.peer} does not have the bytes of record {tip.round}")
        return chain

    def pool_is_right(self, chain: list[Record]) -> None:
        """Who leads takes exactly the samples of the chain for used: what chains that were left have had is free."""
        found = self.world.pool_of(chain[0].ballot.peer).recorded
        # A replica may have swapped to a record, and its coordinator has not heard of that yet.
        uses = [{sample for record in part for sample in samples_of(record)} for part in (chain, chain[1:])]
        if found not in uses:
            wrong = sorted(found ^ uses[0])
            raise Broken(f"samples that are free and taken for used, or the other way round: {wrong}")
