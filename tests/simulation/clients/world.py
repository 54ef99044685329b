"""Clients on several hosts, of which one trains and the others wait: who goes on when one is lost, and when.

What is simulated is `swarm.client_order` as `client.succession` drives it: everybody sees announcements late, a client
that is killed alone is started again by its launcher, and one whose host is lost never comes back. What a client does
when it has its turn, ballots and all, is the matter of the world `round`.
"""

from __future__ import annotations

from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import PeerId
from shoal.swarm.client_order import PATIENCE_S, REDIAL_S, ClientOrder
from shoal.swarm.view import ClientPeer
from shoal.wire.messages.base import Hop

BACK_S = 0.5
"""A launcher starts its client again within that time."""
DIALS_S = 0.1
"""So long a dial takes at most, whether it succeeds or not; a loss is noticed as soon."""
SEEN_S = 2.0
"""So long an announcement is on its way at most."""
EXPIRES_S = 6.0
"""So long the word of a client that is gone may still be read."""
SUCCEEDS_S = EXPIRES_S + PATIENCE_S + SEEN_S + 4 * REDIAL_S
"""After the loss of a host, by then the next client has its turn: a limit of virtual time."""
FOUND_S = REDIAL_S + 2 * DIALS_S
"""A client that has lived for so long has been found again by all who looked for it."""
END_S = 60.0


class Host:
    """A client in all of its starts, and what it has been told of the others."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.peer = world, PeerId(f"C{number}")
        self.join_s = 10.0 * number + world.network.rng.random()
        self.alive = True
        self.leads = number == 0
        self.knew_all = True
        self.generation = 0
        self.gone_for_good = False
        self.alive_since_s = 0.0
        self.lived_briefly = False
        self.begin()

    def begin(self) -> None:
        """Start, knowing nobody."""
        self.generation += 1
        self.alive, self.alive_since_s = True, self.world.network.now_s
        self.order = self.world.order_class(self.peer)
        self.seen: dict[PeerId, ClientPeer] = {}
        self.announcer: PeerId | None = None

    @property
    def record(self) -> ClientPeer:
        return ClientPeer(Hop(self.peer, ()), self.join_s, waits=not self.leads)

    def look(self) -> None:
        """Do what `Succession.turn` does whenever something has changed, or it is time to look."""
        now_s = self.world.network.now_s
        if not self.alive or self.leads:
            return
        self.order.announced([self.record, *self.seen.values()], now_s)
        self.announcer = next((c.peer for c in self.seen.values() if not c.waits), self.announcer)
        is_gone = self.announcer is not None and self.order.is_gone(self.announcer, now_s)
        if (is_gone or self.world.is_kept) and self.order.is_turn(now_s):
            self.world.takes_turn(self)
            return
        for hop in self.order.tick(now_s):
            self.world.dial(self, hop.peer)
        if self.order.wake_at_s < END_S:
            self.world.network.at(self.order.wake_at_s, self.world.if_alive, self, self.generation, self.look)

    def told(self, client: ClientPeer, generation: int) -> None:
        """An announcement has arrived, perhaps of one who is gone."""
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
        self.order.lost(peer, self.world.network.now_s)
        self.look()


class World:
    """One seed: two to four hosts with a client each."""

    def __init__(self, seed: int, order_class: type[ClientOrder] = ClientOrder) -> None:
        self.network = Kernel(seed)
        self.order_class = order_class
        self.linked: set[frozenset[PeerId]] = set()
        self.is_contested = False
        self.turns: list[PeerId] = []
        self.without_client_since_s: float | None = None
        rng = self.network.rng
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

    def dial(self, one: Host, peer: PeerId) -> None:
        other = next(host for host in self.hosts if host.peer == peer)
        self.network.after(self.network.rng.uniform(0.0, DIALS_S), self.dialled, one, one.generation, other)

    def dialled(self, one: Host, generation: int, other: Host) -> None:
        if not one.alive or one.generation != generation:
            return
        if other.alive:
            self.linked.add(frozenset((one.peer, other.peer)))
            for host, peer in ((one, other.peer), (other, one.peer)):
                host.order.up(peer)
                host.look()
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

    def restart(self, host: Host) -> None:
        if host.gone_for_good:
            return
        host.begin()
        if host.leads and any(other.leads and other is not host for other in self.hosts):
            host.leads = False  # a higher ballot was taken meanwhile: it steps down
        self.announce(host, host.generation)

    def _end(self, host: Host) -> None:
        host.lived_briefly = self.network.now_s - host.alive_since_s < FOUND_S
        host.alive = False
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
        if rivals and not all(each.knew_all and not self._is_flapping(each) for each in (host, *rivals)):
            self.is_contested = True
        elif rivals:
            raise Broken(f"{host.peer} takes the run from {rivals[0].peer}, whose launcher has it back at once")
        for other in self.hosts if host.knew_all else ():
            if self._knows_all(other) and not host.gone_for_good and other.record.place < host.record.place:
                raise Broken(f"{host.peer} goes before {other.peer}, which has waited for longer")
        host.leads = True
        if self.without_client_since_s is not None:
            liveness.within(self.network.now_s - self.without_client_since_s, SUCCEEDS_S, "the next client")
            self.without_client_since_s = None
        self.announce(host, host.generation)

    def _knows_all(self, host: Host) -> bool:
        return host.alive and self.network.now_s - host.alive_since_s > EXPIRES_S / 3 + SEEN_S + DIALS_S

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
