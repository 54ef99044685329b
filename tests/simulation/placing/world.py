"""Servers that choose a stage by themselves, each by what it sees of the others, and are moved where that left a gap.

What is simulated is `swarm.assignment` as `control.assignment.StageChooser` uses it, and `swarm.placement` as the
coordinator does before the first round and at each record: everybody sees announcements late and in another order, wall
clocks are anything, servers come and go, and some refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.simulation import liveness
from tests.simulation.network import Manners, Network
from tests.simulation.safety import Broken

from shoal.ids import PeerId, StageIndex
from shoal.swarm.assignment import assign
from shoal.swarm.placement import StageMove, improve
from shoal.swarm.view import Candidate, Replica, SwarmView
from shoal.wire.messages.base import Hop

SETTLE_S = 1.0
FAULTS_END_S = 20.0
SETTLED_S = 60.0
ROUND_S = 1.5


class Server:
    """A server that waits until what it sees does not change any more, and takes the stage that follows from it."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.peer = world, PeerId(f"S{number}")
        self.host = f"host{world.network.rng.randrange(world.num_hosts)}"
        hop = Hop(self.peer, (f"unix:{self.host}:/{number}",))
        self.record: Candidate = Candidate(hop, world.network.wall_s(self.peer))
        self.seen: dict[PeerId, Candidate] = {}
        self.refuses = world.network.rng.random() < 0.1
        self.pinned = world.network.rng.random() < 0.1
        self.changed_s = world.network.now_s
        if self.pinned:
            stage = StageIndex(world.network.rng.randrange(world.num_stages))
            self.record = self._as_replica(stage)
        world.network.start(self.peer, self)
        world.announce(self)
        if not self.pinned:
            world.network.on_host(self.peer, SETTLE_S, self.choose)

    @property
    def stage(self) -> int | None:
        return self.record.stage if isinstance(self.record, Replica) else None

    def deliver(self, sender: str, message: object) -> None:
        """A record of the registry; nothing, if somebody has left it."""
        peer = PeerId(sender)
        before = self.seen.get(peer)
        if isinstance(message, Candidate):
            self.seen[peer] = message
        else:
            self.seen.pop(peer, None)
        if self.seen.get(peer) != before:
            self.changed_s = self.world.network.now_s

    def lost(self, peer: str) -> None:
        """The registry has no connections."""

    def choose(self) -> None:
        left_s = self.changed_s + SETTLE_S - self.world.network.now_s
        if left_s > 1e-9 or self.peer not in self.seen:
            self.world.network.on_host(self.peer, max(left_s, 0.05), self.choose)
            return
        stage = assign(self.world.view_of(self.seen), self.world.num_stages).get(self.peer)
        if stage is None:
            raise Broken(f"{self.peer} finds no stage")
        self.take(stage)

    def take(self, stage: StageIndex) -> None:
        self.record = self._as_replica(stage)
        self.world.announce(self)

    def _as_replica(self, stage: StageIndex) -> Replica:
        record = self.record
        return Replica(record.hop, record.join_unix_s, stage=stage, pinned=self.pinned)


class World:
    """One seed: up to ten servers and four stages."""

    def __init__(
        self,
        seed: int,
        server_class: type[Server] = Server,
        decide: Callable[..., StageMove | None] = improve,
        correct: Callable[..., StageMove | None] = improve,
    ) -> None:
        self.network = Network(seed, lambda message: False, Manners(in_order=False))
        rng = self.network.rng
        self.num_stages = rng.randint(2, 4)
        self.num_hosts = rng.randint(1, 5)
        self.decide, self.correct = decide, correct
        # A client that waits until it sees them all, or one that was there before them.
        is_patient = rng.random() < 0.5
        self.lag_s = rng.choice((0.5, 3.0, 10.0) if is_patient else (0.1, 0.5, 3.0))
        self.refusing: set[PeerId] = set()
        self.num_corrected = 0
        self.order: list[StageMove] = []
        self.servers: dict[PeerId, Server] = {}
        self.server_class = server_class
        together = rng.random() < 0.5
        for number in range(rng.randint(1, 10)):
            self.network.step_wall_clock(f"S{number}", rng.choice((0.0, 0.0, -3600.0, 3600.0)))
            self.network.at(0.01 if together else rng.uniform(0.0, 12.0), self.start, number)
        for _ in range(rng.randint(0, 7)):
            self.network.at(rng.uniform(5.0, FAULTS_END_S), self.kill)
        if is_patient:
            self.network.at(rng.uniform(12.0, FAULTS_END_S), self.begin)
        else:
            self.network.at(ROUND_S, self.round)

    def start(self, number: int) -> None:
        server = self.server_class(self, number)
        self.servers[server.peer] = server
        # What is in the registry already.
        for other in self.servers.values():
            self.tell(server.peer, other)

    def kill(self) -> None:
        """A server dies, and the registry forgets it."""
        if len(self.servers) > 1:
            peer = self.network.rng.choice(sorted(self.servers))
            del self.servers[peer]
            self.network.crash(peer)
            self.order.clear()
            for other in self.servers.values():
                self.network.after(self.network.rng.uniform(0, self.lag_s), other.deliver, peer, None)

    def announce(self, server: Server) -> None:
        for other in [*self.servers, server.peer]:
            self.tell(other, server)

    def tell(self, to: PeerId, server: Server) -> None:
        """The record as it is when it arrives: the newest one is seen, sometime."""
        self.network.after(self.network.rng.uniform(0, self.lag_s), self._arrive, to, server)

    def _arrive(self, to: PeerId, server: Server) -> None:
        host = self.network.hosts.get(to)
        if isinstance(host, Server) and self.servers.get(server.peer, host) in (server, host):
            host.deliver(server.peer, server.record if server.peer in self.network.hosts else None)

    def view_of(self, records: dict[PeerId, Candidate]) -> SwarmView:
        everybody = sorted(records.values(), key=lambda record: record.seniority)
        replicas = sorted((r for r in everybody if isinstance(r, Replica)), key=lambda r: (r.stage, r.seniority))
        return SwarmView(tuple(replicas), tuple(r for r in everybody if not isinstance(r, Replica)))

    def begin(self) -> None:
        """Before the first round: servers are sent where they should stand, one at a time."""
        view = self.true_view()
        if view.candidates:
            self.network.after(0.5, self.begin)
            return
        holders = [replica.peer for replica in view.replicas]
        move = self.correct(view, self.num_stages, holders, self.refusing, trains=False)
        if move is None:
            self.check_places()
            self.network.after(ROUND_S, self.round)
            return
        self.num_corrected += 1
        if self.num_corrected > 30:
            raise Broken(f"the first round never begins: {move} is the next correction")
        if self.servers[move.peer].refuses:
            self.refusing.add(move.peer)
        else:
            self.send(move, view)
        self.network.after(self.network.rng.uniform(0.1, 1.0), self.begin)

    def check_places(self) -> None:
        """Stages have as many replicas as each other, and no machine has all of one that has enough machines.

        Raises:
            Broken: They have not, though everybody could be sent.
        """
        servers = self.servers.values()
        if self.refusing or any(server.pinned for server in servers):
            return
        counts = Counter(server.stage for server in servers)
        of_stage = [counts[stage] for stage in range(self.num_stages)]
        if max(of_stage) - min(of_stage) > 1:
            raise Broken(f"the first round begins with {of_stage} replicas of the stages")
        sizes = Counter(server.host for server in servers)
        for (host, stage), count in Counter((server.host, server.stage) for server in servers).items():
            if count > -(-sizes[host] // self.num_stages):
                raise Broken(f"{host} with {sizes[host]} servers has {count} replicas of stage {stage}")

    def true_view(self) -> SwarmView:
        """Who is there, by what each says itself: connections tell the client."""
        return self.view_of({server.peer: server.record for server in self.servers.values()})

    def send(self, move: StageMove, view: SwarmView) -> None:
        """A server is moved.

        Raises:
            Broken: It must not be.
        """
        server = self.servers[move.peer]
        if server.pinned:
            raise Broken(f"{move.peer} was given its stage by its user and is moved")
        if sum(replica.stage == move.origin for replica in view.replicas) < 2:
            raise Broken(f"{move.peer} is the last one of stage {move.origin}")
        server.take(StageIndex(move.stage))

    def round(self) -> None:
        """A record is committed: one server may be moved."""
        self.network.after(ROUND_S, self.round)
        view = self.true_view()
        holders = [replica.peer for replica in view.replicas]
        move = self.decide(view, self.num_stages, holders, trains=True)
        if move is None:
            return
        self.send(move, view)
        back = [each for each in self.order if (each.peer, each.origin) == (move.peer, move.stage)]
        if self.network.now_s > FAULTS_END_S and back:
            raise Broken(f"{move} undoes {back[-1]}")
        self.order.append(move)

    def run(self) -> None:
        """Run the seed.

        Raises:
            Broken: Somebody is moved who must not be, moves do not end, or a stage stays empty that need not.
        """
        self.network.run(SETTLED_S)
        before = len(self.order)
        self.network.run(SETTLED_S + 10.0)
        liveness.arrived(
            {server.peer: server.record for server in self.servers.values() if server.stage is None}, "the stage"
        )
        if len(self.order) > before:
            raise Broken(f"servers are still moved: {self.order[before:]}")
        counts = Counter(server.stage for server in self.servers.values())
        empty = [stage for stage in range(self.num_stages) if not counts[stage]]
        spare = sum(
            max(0, counts[stage] - max(1, sum(s.pinned and s.stage == stage for s in self.servers.values())))
            for stage in range(self.num_stages)
        )
        if empty and spare >= len(empty):
            raise Broken(f"stages {empty} are empty, and {spare} servers could be spared: {dict(counts)}")
