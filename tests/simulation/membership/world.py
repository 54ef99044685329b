"""Endpoints that watch each other's silence: heartbeats, late ones, stalled loops, frozen and one-way peers.

What is simulated is `swarm.liveness` as `transport` drives it: one timer an endpoint, whose ticks come late when the
event loop is held up. Here a process loses a peer only by the machine's own word, never by the network's.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation import liveness
from tests.simulation.faults import Faults
from tests.simulation.network import Manners, Network
from tests.simulation.safety import Broken

from shoal.swarm.liveness import MAX_TICKS_AT_ONCE, Activity, Liveness

HEARTBEAT_S = 0.25
DEADLINE_S = 2.0
TICK_S = MAX_TICKS_AT_ONCE * HEARTBEAT_S
"""The most silence that one tick counts for, however late it comes."""
LATE_S = 0.65
"""The most by which a tick may be late, or a message be on its way, in a run without other faults.

A peer that has spoken just before a tick sends its next heartbeat at the tick after it. So a peer that is well may be
silent for two late ticks and one late message, and the three together are shorter than the deadline.
"""
FAULTS_END_S = 30.0
END_S = 45.0
_REDIAL_S = 0.5


@dataclass
class Connection:
    """One end; `heard_s` is when something came last, whatever the machine makes of it."""

    heard_s: float
    heard: bool = False
    spoke: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, or anything else."""

    connection: int


class Endpoint:
    """A process with a machine of its own."""

    def __init__(self, world: World, peer: str) -> None:
        self.world, self.peer = world, peer
        self.machine: Liveness[str] = world.liveness_class(
            heartbeat_s=HEARTBEAT_S, deadline_s=DEADLINE_S, now_s=world.network.now_s
        )
        self.connections: dict[str, Connection] = {}
        self.numbers: dict[str, int] = {}
        world.network.start(peer, self)
        world.network.on_host(peer, world.network.rng.uniform(0, HEARTBEAT_S), self.tick)

    def connect(self, other: str, number: int) -> None:
        self.connections[other] = Connection(self.world.network.now_s)
        self.numbers[other] = number

    def deliver(self, sender: str, message: object) -> None:
        connection = self.connections.get(sender)
        if connection is not None and isinstance(message, Beat) and message.connection == self.numbers[sender]:
            connection.heard, connection.heard_s = True, self.world.network.now_s

    def lost(self, peer: str) -> None:
        """The network's word is not asked for here."""

    def tick(self) -> None:
        network = self.world.network
        late_s = network.rng.uniform(0, LATE_S - HEARTBEAT_S) if network.rng.random() < self.world.stall_rate else 0.0
        network.on_host(self.peer, HEARTBEAT_S * network.rng.uniform(1.0, 1.1) + late_s, self.tick)
        # A new connection is another link: what the one before it has missed is none of its silence.
        links = {f"{other} {self.numbers[other]}": other for other in self.connections}
        activity = {
            link: Activity(self.connections[other].heard, self.connections[other].spoke)
            for link, other in links.items()
        }
        pulse = self.machine.tick(network.now_s, activity)
        for connection in self.connections.values():
            connection.heard = connection.spoke = False
        for link, _ in pulse.dead:
            self.world.suspects(self, links[link])
        for other in (links[link] for link in pulse.idle):
            if other in self.connections:
                network.send(self.peer, other, Beat(self.numbers[other]))
        self.talk()

    def talk(self) -> None:
        """Now and then there is something to say."""
        network = self.world.network
        for other, connection in self.connections.items():
            if network.rng.random() < 0.2:
                connection.spoke = True
                network.send(self.peer, other, Beat(self.numbers[other]))


class World:
    """One seed: three to five endpoints, all connected."""

    def __init__(self, seed: int, liveness_class: type[Liveness[str]] = Liveness) -> None:
        # A message that is lost for good, or ends its connection, is the transport's; here it is only late.
        self.network = Network(seed, lambda message: False, Manners(delay_s=0.02))
        rng = self.network.rng
        self.network.manners.slow_rate, self.network.manners.slow_s = rng.choice(((0.0, 0.0), (0.05, LATE_S - 0.3)))
        self.liveness_class = liveness_class
        self.stall_rate = rng.choice((0.0, 0.1))
        self.peers = [f"P{number}" for number in range(rng.randint(3, 5))]
        self.frozen: dict[str, list[tuple[float, float]]] = {peer: [] for peer in self.peers}
        self.num_suspicions = 0
        self._num_connections = 0
        for peer in self.peers:
            Endpoint(self, peer)
        for one in self.peers:
            for other in self.peers:
                if one < other:
                    self.connect(one, other)
        self.is_disturbed = rng.random() < 0.7
        if self.is_disturbed:
            self.faults = Faults(self.network, lambda: self.peers, self._freeze, FAULTS_END_S, self._froze)
            self.faults.plan(6, 3.0)
            self.victim: str | None = None
        else:
            # One process is frozen for good, and nothing else happens: everybody has to notice.
            self.victim = rng.choice(self.peers)
            self.frozen_s = rng.uniform(5.0, 10.0)
            self.network.at(self.frozen_s, self.network.pause, self.victim, 1e6)

    def endpoint(self, peer: str) -> Endpoint:
        host = self.network.hosts[peer]
        if not isinstance(host, Endpoint):
            raise Broken(f"{peer} is no endpoint")
        return host

    def connect(self, one: str, other: str) -> None:
        """A new connection, unless there is one or it cannot be made."""
        network = self.network
        if other in self.endpoint(one).connections:
            return
        if network.blocked(one, other) or not (network.awake(one) and network.awake(other)):
            network.after(_REDIAL_S, self.connect, one, other)
            return
        self._num_connections += 1
        network.dial(one, other)
        self.endpoint(one).connect(other, self._num_connections)
        self.endpoint(other).connect(one, self._num_connections)

    def suspects(self, here: Endpoint, there: str) -> None:
        """A machine gives its peer up: that must have been silent for so long, as far as this process can tell."""
        now_s, connection = self.network.now_s, here.connections[there]
        self.num_suspicions += 1
        silent_s = now_s - connection.heard_s
        if silent_s < DEADLINE_S:
            raise Broken(f"{here.peer} gives {there} up after {silent_s:.2f} s of silence")
        if not self.is_disturbed and there != self.victim:
            raise Broken(f"{here.peer} suspects {there}, which is well")
        # What it was frozen for counts for nothing but what one tick may count for, before and after.
        since_s = [(begun_s, end_s) for begun_s, end_s in self.frozen[here.peer] if end_s > connection.heard_s]
        listened_s = silent_s - sum(end_s - max(begun_s, connection.heard_s) for begun_s, end_s in since_s)
        if listened_s < DEADLINE_S - len(since_s) * TICK_S:
            raise Broken(f"{here.peer} gives {there} up, and has listened for {listened_s:.2f} s of {silent_s:.2f} s")
        awake_s = max((end_s for _, end_s in self.frozen[here.peer]), default=0.0)
        is_well = self.network.reachable(there, here.peer, connection.heard_s, now_s)
        if is_well and now_s - awake_s > DEADLINE_S:
            raise Broken(f"{here.peer} suspects {there}, and both could talk all the time")
        self._close(here.peer, there)

    def _close(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            self.endpoint(here).connections.pop(there, None)
        if self.victim is None:
            self.network.after(_REDIAL_S, self.connect, min(one, other), max(one, other))

    def _freeze(self, peer: str) -> None:
        self.faults.pause(peer, min(self.network.rng.uniform(0.5, 8.0), FAULTS_END_S - self.network.now_s))

    def _froze(self, peer: str, duration_s: float) -> None:
        frozen, now_s = self.frozen[peer], self.network.now_s
        if frozen and frozen[-1][1] >= now_s:
            begun_s, end_s = frozen.pop()
            frozen.append((begun_s, max(end_s, now_s + duration_s)))
        else:
            frozen.append((now_s, now_s + duration_s))

    def run(self) -> None:
        """Run the seed.

        Raises:
            Broken: Somebody was suspected who was well, or a silence was not noticed.
        """
        if self.victim is not None:
            self.network.run(self.frozen_s + DEADLINE_S + 4 * LATE_S)
            left = {peer: self.victim for peer in self.peers if self.victim in self.endpoint(peer).connections}
            left.pop(self.victim, None)
            liveness.arrived(left, "the suspicion of the frozen")
            return
        self.network.run(END_S)
        missing = {
            f"{one}-{other}": "not connected"
            for one in self.peers
            for other in self.peers
            if one < other and other not in self.endpoint(one).connections
        }
        liveness.arrived(missing, "the connection")
