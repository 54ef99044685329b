"""A world in which servers also move to other stages, while rounds end, replicas and clients die, and links break."""

from __future__ import annotations

from tests.simulation import liveness
from tests.simulation.round.hosts import ClientHost, ReplicaHost
from tests.simulation.round.mirrors import Copy
from tests.simulation.round.world import FAULTS_END_S, World
from tests.simulation.safety import Broken

from shoal.ids import Ballot, PeerId, StageIndex
from shoal.swarm.move_orders import Begun, Ended, MoveEffect, MoveEnd, MoveOrders, MoveSettings, SendOrder
from shoal.swarm.placement import improve
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect, MemberEffect, Relocate, RoundReady
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.round import Move, Moving, RoundState

_REGISTRY_LAG_S = 1.0
_BUILD_S = 0.3


class MovingReplica(ReplicaHost):
    """A replica that goes where it is sent: builds, drains, ends its connections, and is a newcomer there.

    Attributes:
        before: What it was, until it holds a record as a replica of its new stage.
    """

    world: MovingWorld
    before: MovingReplica | None = None

    def _act(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Relocate):
                delay_s = self.world.network.exponential(_BUILD_S)
                self.world.network.on_host(self.peer, delay_s, self.world.move, self, effect.stage)
        super()._act([effect for effect in effects if not isinstance(effect, Relocate)])
        if self.before is not None and not self.machine.is_behind:
            self.before = None
            self.world.announce(self)


class MovingClient(ClientHost):
    """A client that sends servers."""

    world: MovingWorld

    def __init__(self, world: MovingWorld, peer: PeerId) -> None:
        super().__init__(world, peer)
        self.orders = world.orders_class(world.num_stages, MoveSettings(silence_s=6.0, timeout_s=20.0))
        self.stages: dict[PeerId, int] = {}

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, RoundState):
            self.stages[PeerId(sender)] = message.stage
        if isinstance(message, Moving):
            if message.ballot == self.machine.ballot:
                self._send(self.orders.receive(PeerId(sender), message, self.now_s))
            return
        super().deliver(sender, message)

    def lost(self, peer: str) -> None:
        self.stages.pop(PeerId(peer), None)
        self.orders.lost(PeerId(peer))
        super().lost(peer)

    def send_servers(self) -> None:
        if self.leads and self.machine.holders is not None:
            holders = self.machine.holders
            self._send(self.orders.update(self.world.seen_by(self), holders, self.stages, self.now_s))

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        super()._act(effects)
        for effect in effects:
            if isinstance(effect, RoundReady) and self.is_here:
                view, round = self.world.seen_by(self), effect.tip.round
                self._send(self.orders.recorded(view, effect.holders, round, self.now_s))

    def _send(self, effects: list[MoveEffect]) -> None:
        for effect in effects:
            match effect:
                case SendOrder(move):
                    order = Move(self.machine.ballot, self.machine.tip.round + 1, move.stage, move.urgent)
                    self.world.send(self.peer, move.peer, order)
                case Begun(move):
                    self.world.ordered(self, move.peer)
                case Ended(_, MoveEnd.ARRIVED):
                    self.world.num_arrived += 1
                case _:
                    pass


class MovingWorld(World):
    """Stage 0 begins with more replicas than the others, and whoever dies may stay away."""

    def __init__(
        self,
        seed: int,
        member_class: type[RoundMemberMachine] = RoundMemberMachine,
        coordinator_class: type[RoundCoordinatorMachine] = RoundCoordinatorMachine,
        orders_class: type[MoveOrders] = MoveOrders,
        faults: bool = True,
        coordinators_die: bool = False,
    ) -> None:
        self.coordinators_die = coordinators_die
        self.orders_class = orders_class
        self.announced: dict[str, int] = {}
        self.joined_unix_s: dict[str, float] = {}
        self.num_arrived = self.num_switched = 0
        super().__init__(seed, member_class, coordinator_class, MovingReplica, MovingClient, faults)
        manners = self.network.manners
        # What ends connections, holds messages up or mixes them, at any moment.
        is_orderly = manners.in_order and not (manners.loss_rate or manners.slow_rate or manners.repeat_rate)
        self.is_rough = not is_orderly or bool(self.sabotage or self.meddling)
        for slot in range(self.num_slots, self.num_slots + self.network.rng.randint(2, 4)):
            peer = PeerId(f"R0.{slot}")
            self.replicas.append(peer)
            self._start_replica(peer, 0)
        self.network.after(0.4, self._look)
        self.network.at(self.network.rng.uniform(2.0, FAULTS_END_S), self._stale_order)

    # -- what the base class starts

    def sizes(self) -> tuple[int, int]:
        return self.network.rng.choice((2, 3)), self.network.rng.choice((1, 2, 2, 3))

    def _start_replica(self, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        super()._start_replica(peer, stage, is_behind)
        host = self.network.hosts[peer]
        if isinstance(host, MovingReplica):
            self.announce(host)

    def _look(self) -> None:
        self.network.after(0.2, self._look)
        for client in self.client_hosts():
            if isinstance(client, MovingClient) and self.network.awake(client.peer):
                client.send_servers()

    # -- the registry, which comes late

    def announce(self, host: ReplicaHost) -> None:
        """Tell the registry; the order of joining is told by wall clocks, which may be anything."""
        self.joined_unix_s.setdefault(host.peer, self.network.wall_s(host.peer))
        self.announced.setdefault(host.peer, host.stage)
        delay_s = self.network.rng.uniform(0, _REGISTRY_LAG_S)
        self.network.after(delay_s, self._registered, host, self.network.boots[host.peer])

    def _registered(self, host: ReplicaHost, boot: int) -> None:
        if self.network.boots[host.peer] == boot:
            self.announced[host.peer] = host.stage

    def seen_by(self, client: MovingClient) -> SwarmView:
        replicas = [
            Replica(h.machine.hop, self.joined_unix_s[h.peer], stage=StageIndex(self.announced[h.peer]), serving=True)
            for h in self.replica_hosts()
            if client.machine._replicas.known.get(h.peer)
        ]
        return SwarmView(tuple(replicas)).placed(client.stages)

    # -- moves

    def ordered(self, client: MovingClient, peer: PeerId) -> None:
        """A move is ordered; its coordinator may die right after."""
        if self.coordinators_die and self.network.now_s < FAULTS_END_S - 8.0:
            self.network.after(self.network.rng.uniform(0.0, 0.4), self._crash, client.peer)

    def move(self, old: MovingReplica, stage: int) -> None:
        """The server has built the new replica and drained the old one."""
        if self.network.hosts.get(old.peer) is not old:
            return
        if self.twin(old) is None:  # as the server's own view says
            old._act(old.machine.stay("it is the last one of its stage"))
            return
        self.num_switched += 1
        new = MovingReplica(self, old.peer, stage, self._has_begun(old))
        new.machine.hop = old.machine.hop
        new.machine.succeed(old.machine.promised, self._has_begun(old))
        new.before = old
        self.check_move(old)
        self.network.replace(old.peer, new)

    def check_move(self, old: MovingReplica) -> None:
        """A second server must not leave while the first is on its way, unless the first cannot be reached."""
        others = [
            h for h in self.replica_hosts() if isinstance(h, MovingReplica) and h is not old and h.before is not None
        ]
        if others and not self.is_disturbed:
            raise Broken(f"{old.peer} moves while {others[0].peer} does")

    @property
    def is_disturbed(self) -> bool:
        """Whether something went wrong lately that may hide a mover from a coordinator."""
        return self.is_rough or (self.has_faults and self.faults.num_faults > 0)

    def _has_begun(self, host: ReplicaHost) -> bool:
        return host.machine.is_behind or host.machine.tip.round > 0

    def twin(self, host: ReplicaHost) -> ReplicaHost | None:
        """Another holder of the same state that stays: movers, and those who are about to leave, do not count."""
        leaving = {h.peer for h in self.replica_hosts() if h.machine.destination is not None}
        leaving |= {
            c.orders.under_way.peer
            for c in self.client_hosts()
            if isinstance(c, MovingClient) and c.orders.under_way is not None
        }
        machine = host.machine
        for other in self.replica_hosts():
            same = other.machine.tip.hash == machine.tip.hash and not other.machine.is_behind
            same = same and other.machine.prepared == machine.prepared and other.machine.swapping is None
            if other is not host and other.stage == host.stage and same and other.peer not in leaving:
                return other
        return None

    def givers(self) -> list[ReplicaHost | Copy]:
        """Whoever moves gives the state of its old stage away until it has that of the new one."""
        hosts = [host for host in self.replica_hosts() if isinstance(host, MovingReplica)]
        return [*super().givers(), *(host.before for host in hosts if host.before is not None)]

    # -- faults

    def restart_replica(self, peer: PeerId) -> None:
        """A server that starts again takes the stage that nobody serves, as every server does that may choose."""
        served = {host.stage for host in self.replica_hosts()}
        empty = [stage for stage in range(self.num_stages) if stage not in served]
        self._start_again(peer, empty[0] if empty else int(peer[1]))

    def _stale_order(self) -> None:
        """A client that leads no more sends somebody away."""
        hosts = [h for h in self.replica_hosts() if h.machine.promised.number > 1 and h.machine.destination is None]
        for host in hosts[:1]:
            client = self.clients[0]
            ballot = Ballot(host.machine.promised.number - 1, client, 1)
            stage = (host.stage + 1) % self.num_stages
            host.deliver(client, Move(ballot, host.machine.round, stage, False))
            if host.machine.destination is not None:
                raise Broken(f"{host.peer} follows a client that leads no more")
        if not hosts:
            self.network.after(1.0, self._stale_order)

    def run(self) -> int:
        rounds = super().run()
        if self.is_split:
            return rounds
        movers = [host for host in self.replica_hosts() if isinstance(host, MovingReplica) and host.before is not None]
        liveness.arrived({host.peer: host.stage for host in movers}, "the stage")
        replicas = (
            Replica(h.machine.hop, self.joined_unix_s[h.peer], stage=StageIndex(h.stage)) for h in self.replica_hosts()
        )
        holders = [h.peer for h in self.replica_hosts()]
        left = improve(SwarmView(tuple(replicas)), self.num_stages, holders, trains=True)
        if left is not None:
            raise Broken(f"somebody is still in the wrong place: {left}")
        return rounds
