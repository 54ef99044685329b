"""Clients on several hosts, of which one trains and the others wait: who goes on when one is lost, and when.

What is simulated is `swarm.client_turn`: everybody sees announcements late, a client that is killed alone is started
again by its launcher, and one whose host is lost never comes back. Servers, which are there all the time, say which
client they are connected with; one of several loses its connection now and then. Some hosts are told for a while that
no client announces the run. What a client does when it has its turn, ballots and all, is the matter of the world
`round`.
"""

from __future__ import annotations

from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import PeerId, StageIndex
from shoal.swarm.client_turn import ASK_AGAIN_S, PATIENCE_S, REDIAL_S, AskClient, ClientTurn, TakeTurn
from shoal.swarm.view import ClientPeer, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop

BACK_S = 0.5
"""A launcher starts its client again within that time."""
DIALS_S = 0.1
"""So long a dial takes at most, whether it succeeds or not; a loss is noticed as soon."""
SEEN_S = 2.0
"""So long an announcement is on its way at most."""
EXPIRES_S = 6.0
"""So long the word of a client that is gone may still be read."""
SUCCEEDS_S = EXPIRES_S + PATIENCE_S + SEEN_S + 4 * REDIAL_S + ASK_AGAIN_S + 2 * DIALS_S
"""After the loss of a host, by then the next client has its turn: a limit of virtual time."""
FOUND_S = REDIAL_S + 2 * DIALS_S
"""A client that has lived for so long has been found again by all who looked for it."""
KNOWN_S = ASK_AGAIN_S + 2 * DIALS_S
"""A client that has led for so long is what servers have said when they were asked last."""
END_S = 60.0
SCOUT = PeerId("scout")


class Server:
    """A server, and the client that it is connected with."""

    def __init__(self, number: int) -> None:
        self.peer = PeerId(f"S{number}")
        self.client: tuple[PeerId, int] | None = (PeerId("C0"), 1)  # in which of its starts
        self.is_cut_off = False

    def tells(self) -> PeerId | None:
        return None if self.is_cut_off or self.client is None else self.client[0]


class Host:
    """A client in all of its starts, and what it has been told of the others."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.peer = world, PeerId(f"C{number}")
        self.join_s = 10.0 * number + world.network.rng.random()
        self.alive = True
        self.leads = number == 0
        self.knew_all = True
        self.generation = 0
        self.gone_for_good = self.is_misled = False
        self.led_since_s = 0.0
        self.alive_since_s = self.told_since_s = 0.0
        self.lived_briefly = False
        self.begin()

    def begin(self) -> None:
        """Start, knowing nobody."""
        self.generation += 1
        self.alive, self.alive_since_s = True, self.world.network.now_s
        self.told_since_s = self.alive_since_s
        self.turn = self.world.turn_class(self.peer, "run")
        self.seen: dict[PeerId, ClientPeer] = {}

    @property
    def record(self) -> ClientPeer:
        return ClientPeer(Hop(self.peer, ()), self.join_s, waits=not self.leads)

    @property
    def view(self) -> SwarmView:
        """The run is announced by the client that trains, else by hosts of servers."""
        trains = next((client.peer for client in self.seen.values() if not client.waits), None)
        run = None if trains is None else Run("run", 1, trains)
        if run is None and (self.is_misled or self.world.is_kept):
            run = Run("run", 1, SCOUT, kept=True)
        servers = (Replica(Hop(server.peer, ()), 0.0, stage=StageIndex(0)) for server in self.world.servers)
        return SwarmView(tuple(servers), clients=(self.record, *self.seen.values()), run=run)

    def look(self) -> None:
        """As `client.run_driver` does while it waits."""
        now_s = self.world.network.now_s
        while self.alive and not self.leads and (effects := self.turn.look(self.view, now_s)):
            for effect in effects:
                match effect:
                    case AskClient(hop):
                        self.world.ask(self, hop.peer)
                    case TakeTurn():
                        self.world.takes_turn(self)
                    case _:
                        pass
        wake_at_s = self.turn.wake_at_s
        if self.alive and not self.leads and wake_at_s < 3 * END_S:
            if wake_at_s <= now_s:
                raise Broken(f"{self.peer} is to be looked at again and again")
            self.world.network.at(wake_at_s, self.world.if_alive, self, self.generation, self.look)

    def told(self, client: ClientPeer, generation: int) -> None:
        """An announcement has arrived, perhaps of one who is gone."""
        if self.is_misled:
            return
        self.seen[client.peer] = client
        self.world.network.after(EXPIRES_S, self.world.if_alive, self, self.generation, lambda: self.expires(client))
        self.look()

    def expires(self, client: ClientPeer) -> None:
        if self.seen.get(client.peer) is client:
            del self.seen[client.peer]
            self.look()

    def lost(self, peer: PeerId) -> None:
        """A connection has ended, or could not be made; what the lost one has announced counts no more."""
        self.seen.pop(peer, None)
        self.turn.lost(peer, self.world.network.now_s)
        self.look()


class World:
    """One seed: two to four hosts with a client each."""

    def __init__(self, seed: int, turn_class: type[ClientTurn] = ClientTurn) -> None:
        self.network = Kernel(seed)
        self.turn_class = turn_class
        self.linked: set[frozenset[PeerId]] = set()
        self.is_contested = False
        self.turns: list[PeerId] = []
        self.without_client_since_s: float | None = None
        rng = self.network.rng
        self.servers = [Server(number) for number in range(rng.randint(1, 3))]
        self.hosts = [Host(self, number) for number in range(rng.randint(2, 4))]
        for host in self.hosts:
            self.announce(host, host.generation)
        at_s = 5.0
        for victim in rng.sample(self.hosts, len(self.hosts) - 1):
            at_s += rng.uniform(0.0, 12.0)
            for _ in range(rng.randint(0, 3)):
                self.network.at(at_s, self.kill, rng.choice(self.hosts))
                at_s += rng.uniform(BACK_S, 4.0)
            self.network.at(at_s, self.lose, victim)
        for _ in range(rng.randint(0, 2)):
            self.network.at(rng.uniform(3.0, at_s), self.mislead, rng.choice(self.hosts), rng.uniform(3.0, 15.0))
        if len(self.servers) > 1:
            self.network.at(rng.uniform(0.0, at_s), self.cut_off, rng.choice(self.servers), rng.uniform(1.0, 15.0))
        self.network.at(at_s + 4 * SUCCEEDS_S, self.settled)

    # -- what all see

    def if_alive(self, host: Host, generation: int, call: object, *arguments: object) -> None:
        """Do something of a process, unless that has ended meanwhile."""
        if host.alive and host.generation == generation:
            call(*arguments)  # type: ignore[operator]

    @property
    def is_kept(self) -> bool:
        """Whether hosts of servers announce the run: they do when no client does any more."""
        since_s = self.without_client_since_s
        return since_s is not None and self.network.now_s >= since_s + EXPIRES_S

    def announce(self, host: Host, generation: int) -> None:
        """Say that it is there, and again every few seconds."""
        if not host.alive or host.generation != generation:
            return
        for other in self.hosts:
            if other is not host:
                delay_s = self.network.rng.uniform(0.0, SEEN_S)
                self.network.after(delay_s, self.arrives, other, host.record, generation)
        self.network.after(EXPIRES_S / 3, self.announce, host, generation)

    def arrives(self, at: Host, client: ClientPeer, generation: int) -> None:
        speaker = next(host for host in self.hosts if host.peer == client.peer)
        if at.alive and speaker.alive and speaker.generation == generation:
            at.told(client, generation)

    def ask(self, one: Host, peer: PeerId) -> None:
        """Dial a peer, and have it say which client it has."""
        server = next((server for server in self.servers if server.peer == peer), None)
        if server is not None:
            delay_s = self.network.rng.uniform(0.0, DIALS_S)
            self.network.after(delay_s, self.if_alive, one, one.generation, self.answers, one, server)
            return
        other = next(host for host in self.hosts if host.peer == peer)
        self.network.after(self.network.rng.uniform(0.0, DIALS_S), self.dialled, one, one.generation, other)

    def answers(self, one: Host, server: Server) -> None:
        one.turn.told(server.peer, server.tells())
        one.look()

    def dialled(self, one: Host, generation: int, other: Host) -> None:
        if not one.alive or one.generation != generation:
            return
        if other.alive:
            self.linked.add(frozenset((one.peer, other.peer)))
            for host, peer in ((one, other.peer), (other, one.peer)):
                host.turn.up(peer)
                host.look()
            one.turn.told(other.peer, other.peer if other.leads else None)
            one.look()
        else:
            one.lost(other.peer)

    # -- faults

    def kill(self, host: Host) -> None:
        """The process ends; its launcher starts it again."""
        if host.alive:
            self._end(host)
            self.network.after(self.network.rng.uniform(0.05, BACK_S), self.restart, host)

    def lose(self, host: Host) -> None:
        """The host is gone, with its launcher."""
        host.gone_for_good = True
        if host.alive:
            self._end(host)
        if host.leads:
            host.leads, self.without_client_since_s = False, self.network.now_s
            for other in self.hosts:
                self.network.after(EXPIRES_S, other.look)

    def mislead(self, host: Host, for_s: float) -> None:
        """What others announce does not reach a host; that hosts of servers keep the run does."""
        if not host.leads and host.alive:
            host.is_misled, host.seen = True, {}
            if self.network.rng.random() < 0.5:
                self._end(host)
                self.restart(host)
            self.network.after(for_s, self.enlighten, host)
            host.look()

    def enlighten(self, host: Host) -> None:
        host.is_misled, host.told_since_s = False, self.network.now_s

    def cut_off(self, server: Server, for_s: float) -> None:
        """One server of several has no connection with the client, whoever that is."""
        server.is_cut_off = True
        self.network.after(for_s, self.mend, server)

    def mend(self, server: Server) -> None:
        server.is_cut_off = False

    def connect(self, host: Host) -> None:
        """A client that leads is connected with all servers soon."""
        host.led_since_s = self.network.now_s
        for server in self.servers:
            delay_s = self.network.rng.uniform(0.0, DIALS_S)
            self.network.after(delay_s, self.if_alive, host, host.generation, self.connected, host, server)

    def connected(self, host: Host, server: Server) -> None:
        if host.leads:
            server.client = (host.peer, host.generation)

    def disconnected(self, client: tuple[PeerId, int], server: Server) -> None:
        if server.client == client:
            server.client = None

    def restart(self, host: Host) -> None:
        if host.gone_for_good:
            return
        host.begin()
        if host.leads and any(other.leads and other is not host for other in self.hosts):
            host.leads = False  # a higher ballot was taken meanwhile: it steps down
        if host.leads:
            self.connect(host)
        self.announce(host, host.generation)

    def _end(self, host: Host) -> None:
        host.lived_briefly = self.network.now_s - host.alive_since_s < FOUND_S
        host.alive = False
        for server in self.servers:
            self.network.after(
                self.network.rng.uniform(0.0, DIALS_S), self.disconnected, (host.peer, host.generation), server
            )
        for other in self.hosts:
            link = frozenset((host.peer, other.peer))
            if other is not host and link in self.linked:
                self.linked.discard(link)
                delay_s = self.network.rng.uniform(0.0, DIALS_S)
                self.network.after(delay_s, self.if_alive, other, other.generation, other.lost, host.peer)

    # -- promises

    def takes_turn(self, host: Host) -> None:
        """A client goes on with the run."""
        self.turns.append(host.peer)
        host.knew_all = self._knows_all(host)
        rivals = [other for other in self.hosts if other is not host and other.leads and not other.gone_for_good]
        # Who has just started has not heard of all, and who was killed twice at once has been away for too long:
        # between them and others ballots decide, which are not simulated here.
        known = [each for each in rivals if each.alive and self.network.now_s - each.led_since_s > KNOWN_S]
        if known and host.is_misled:
            raise Broken(f"{host.peer} takes the run from {known[0].peer}, with which servers are connected")
        if rivals and not all(each.knew_all and not self._is_flapping(each) for each in (host, *rivals)):
            host.leads = self.is_contested = True
            return
        if rivals:
            raise Broken(f"{host.peer} takes the run from {rivals[0].peer}, whose launcher has it back at once")
        for other in self.hosts if host.knew_all else ():
            if self._knows_all(other) and not host.gone_for_good and other.record.place < host.record.place:
                raise Broken(f"{host.peer} goes before {other.peer}, which has waited for longer")
        host.leads = True
        self.connect(host)
        if self.without_client_since_s is not None:
            liveness.within(self.network.now_s - self.without_client_since_s, SUCCEEDS_S, "the next client")
            self.without_client_since_s = None
        self.announce(host, host.generation)

    def _knows_all(self, host: Host) -> bool:
        if host.is_misled:
            return False
        return host.alive and self.network.now_s - host.told_since_s > EXPIRES_S / 3 + SEEN_S + DIALS_S

    def _is_flapping(self, host: Host) -> bool:
        """Whether it has been killed twice so fast that some have not found it in between, nor since."""
        return host.lived_briefly and not (host.alive and self.network.now_s - host.alive_since_s >= FOUND_S)

    def settled(self) -> None:
        """The last host was lost long ago: whoever is left trains."""
        leading = [host.peer for host in self.hosts if host.leads and host.alive]
        if len(leading) != 1:
            raise Broken(f"{len(leading)} clients train at the end: {leading}")

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: Two clients train, or the wrong one, or none.
        """
        self.network.run(END_S * 3, lambda: self.is_contested)
