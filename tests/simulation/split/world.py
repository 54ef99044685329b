"""A swarm that is parted so that sides go on apart, each with a client and replicas of every stage, and meets again.

Each client has a pool of samples of its own, as each host has a data server; so both sides train on the same samples.
"""

from __future__ import annotations

import random
from collections import defaultdict

from tests.simulation import liveness
from tests.simulation.round.hosts import ClientHost, ReplicaHost, holds
from tests.simulation.round.world import FAULTS_END_S, DataServer
from tests.simulation.round.world import World as RoundWorld
from tests.simulation.safety import Broken
from tests.simulation.split.checks import SplitChecks
from tests.simulation.split.hosts import Client, Replica

from shoal.ids import PeerId
from shoal.swarm.mirror import MirrorMachine
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import ChainLeft
from shoal.swarm.round_member import RoundMemberMachine
from shoal.wire.messages.round import CommitRecord, PrepareRecord, Resolve, SignedRecord

MET_S = 40.0
END_S = 54.0
LAST_S = 80.0
"""Many replicas on a slow network may need so long for two rounds: each part of one waits for the slowest of them."""


class SplitWorld(RoundWorld):
    """One seeded run.

    In some of them the sides meet while one commits a record or settles doubts: what a coordinator has heard of the
    others is not true any more when it acts on it, and of one step each side may have settled something else.
    """

    checks: SplitChecks

    def __init__(
        self,
        seed: int,
        member_class: type[RoundMemberMachine] = RoundMemberMachine,
        coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine,
        host_class: type[ReplicaHost] = Replica,
        client_class: type[ClientHost] = Client,
        faults: bool = True,
        meets: bool | None = None,
        mirror_class: type[MirrorMachine] = MirrorMachine,
    ) -> None:
        self.chains_left: list[ChainLeft] = []
        # Of its own source: a seed without this fault is the same run as ever.
        rng = random.Random(f"meets {seed}")
        happens = rng.random() < 0.3 if meets is None else meets
        self._meets_at = rng.choice((PrepareRecord, CommitRecord, Resolve)) if happens and faults else None
        self._meets_after = rng.randint(1, 12)
        self._meets_within_s = rng.choice((0.1, 0.5))
        self._parted_until_s = 0.0
        super().__init__(seed, member_class, coordinator_class, host_class, client_class, faults, mirror_class)
        if self._meets_at is Resolve:
            self.doubt_rate = 0.5

    def prepare(self) -> None:
        self.pools: defaultdict[PeerId, DataServer] = defaultdict(DataServer)

    def sizes(self) -> tuple[int, int]:
        rng = self.network.rng
        return rng.choice((2, 2, 3)), rng.choice((2, 3, 4))

    def num_clients(self) -> int:
        return self.network.rng.choice((2, 2, 2, 3))

    def pool_of(self, client: PeerId) -> DataServer:
        return self.pools[client]

    def make_checks(self) -> SplitChecks:
        return SplitChecks(self)

    def hears(self, host: ClientHost, other: ClientHost) -> bool:
        return super().hears(host, other) and not self.network.blocked(host.peer, other.peer)

    def tip_of(self, signed: SignedRecord) -> Tip:
        """A record as a tip."""
        return Tip(self.unseal(signed).round, record_hash(signed), signed)

    # -- what runs

    def _train(self) -> None:
        """Every slot of every client that trains has one step, over replicas that this client has told it of."""
        rng, network = self.network.rng, self.network
        network.after(0.35, self._train)
        for client in self.client_hosts():
            if (
                not isinstance(client, Client)
                or client.tip is None
                or not client.trains
                or not network.awake(client.peer)
            ):
                continue
            hosts = {
                host.peer: host
                for host in self.replica_hosts()
                if isinstance(host, Replica)
                and host.peer in client.told
                and network.awake(host.peer)
                and not network.blocked(client.peer, host.peer)
            }
            for slot in range(self.num_slots):
                path: list[ReplicaHost] = []
                for stage in range(self.num_stages):
                    of_stage = [host for host in hosts.values() if host.stage == stage]
                    here = [host for host in of_stage if host.takes(client.tip.round + 1, client.tip.hash)]
                    if here:
                        path.append(rng.choice(here))
                if len(path) == self.num_stages:
                    if not all(holds(host, client.tip) for host in path):
                        raise Broken(f"{client.peer} trains over replicas of another chain")
                    self._step(slot, path, self.pool_of(client.peer))

    # -- faults

    def plan_faults(self) -> None:
        rng = self.network.rng
        self.faults.plan(rng.choice((0, 3, 6)), 1.0)
        for _ in range(rng.choice((1, 1, 2))):
            self.network.at(rng.uniform(1.5, FAULTS_END_S - 8.0), self._part)

    def _part(self) -> None:
        """Part the swarm; mostly so that both sides have a client and replicas of every stage."""
        network, rng = self.network, self.network.rng
        sides: dict[str, int] = {}
        for stage in range(self.num_stages):
            peers = [peer for peer in self.replicas if peer.startswith(f"R{stage}.")]
            rng.shuffle(peers)
            num_there = rng.randint(1, len(peers) - 1) if rng.random() < 0.9 else 0
            sides |= {peer: int(number < num_there) for number, peer in enumerate(peers)}
        clients = rng.sample(self.clients, len(self.clients))
        sides |= {peer: number % 2 for number, peer in enumerate(clients)}
        until_s = self._parted_until_s = rng.uniform(network.now_s + 4.0, FAULTS_END_S - 4.0)
        stagger_s = rng.choice((0.0, 0.5, 2.0, 4.0))
        for one, other in ((one, other) for one in sides for other in sides if sides[one] < sides[other]):
            duration_s = until_s - network.now_s + rng.uniform(0.0, stagger_s)
            network.mute(one, other, duration_s)
            network.mute(other, one, duration_s)

    def send(self, sender: str, receiver: str, message: object) -> None:
        super().send(sender, receiver, message)
        if type(message) is self._meets_at and self.network.now_s < self._parted_until_s:
            self._meets_after -= 1
            if self._meets_after == 0:
                self.network.meet(self._meets_within_s)

    def run(self) -> int:
        """Run to the end; returns how many rounds the chain has that stands.

        Raises:
            Broken: Something that must never happen has happened, or there is not one chain that goes on in the end.
        """
        self.network.run(MET_S)
        before = self._newest_round()
        self.network.run(END_S)
        liveness.given_time(self.network, LAST_S, lambda: self._newest_round() >= before + 2)
        now = self._newest_round()
        liveness.goes_on(before, now)
        liveness.nobody_left_behind({host.peer: host.machine.tip.round for host in self.replica_hosts()})
        self.mirrors.have_followed(before)
        self.checks.pool_is_right(self.checks.one_chain())
        return now

    def _newest_round(self) -> int:
        return max(host.machine.tip.round for host in self.replica_hosts())
