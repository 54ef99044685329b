"""The whole swarm with snapshots on buddies: servers die, and go on from what others keep of them.

Beside the faults of the swarm: bytes flip at a buddy; and a replica that alone has got a Commit dies, while another one
of the path is in doubt about it. Sometimes it dies once more, and its buddies are frozen in between.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from tests.simulation.round.hosts import digest, hashes_of
from tests.simulation.round.world import FAULTS_END_S
from tests.simulation.safety import Broken
from tests.simulation.step.hosts import TrainerHost
from tests.simulation.swarm.hosts import Server, Steps
from tests.simulation.swarm.world import World
from tests.simulation.swarm.world import is_bulk as is_tensor

from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm.round_effects import CloseSteps, Fetch, MemberEffect
from shoal.swarm.snapshots import AskBuddy, Base, SearchEffects, SnapshotSearch, SnapshotStore, Take, buddies, is_due
from shoal.swarm.step_operations import Operation, OperationKind
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import AskSnapshot, NoSnapshot, OfferSnapshot, Snapshot, SnapshotKept, SnapshotMessage
from shoal.wire.messages.step import Commit, StepMessage
from shoal.wire.messages.transfer import Chunk, Missing, TransferMessage, Want

_PATIENCE_S = 1.0
Content = tuple[str, tuple[StepKey, ...], tuple[tuple[StepKey, ...], ...]]
"""What a snapshot holds: the bytes that the round began from, the steps that were applied to them, and by fragment
those that are in its parameters and in no average of it yet."""


class Parcel(NamedTuple):
    """A message about snapshots: an offer with what is decoded of it, one chunk with the whole content."""

    message: SnapshotMessage | TransferMessage
    snapshot: Snapshot | None = None
    content: Content | None = None


def is_bulk(message: object) -> bool:
    return is_tensor(message) or (type(message) is Parcel and type(message.message) is Chunk)


class SnapshotSteps(Steps):
    """Tells its server of each boundary."""

    server: SnapshotServer

    def begin(self, round: int) -> None:
        if not self.server.waits:
            super().begin(round)

    def _finish(self, operation: Operation, generation: int) -> None:
        is_same = generation == self.generation
        super()._finish(operation, generation)
        if is_same and operation.kind == OperationKind.COMMIT:
            self.server.boundary()

    def resume(self, snapshot: Snapshot) -> bool:
        if not self.machine.resume(snapshot.log, snapshot.earlier):
            return False
        assert self.server.content is not None
        self.since = [list(keys) for keys in self.server.content[2]]
        self.applied = [entry.key for entry in self.machine.log]
        self.buffers = list(self.applied)
        return True


class SnapshotServer(Server):
    """A server that has a buddy, and is one."""

    world: SnapshotWorld
    steps_class = SnapshotSteps

    def __init__(self, world: SnapshotWorld, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        self.generation = world.network.boots.get(peer, 0) + 1
        self.store = SnapshotStore(stage, 3)
        self.kept: dict[PeerId, tuple[Snapshot, Content]] = {}
        self.made: tuple[Snapshot, Content] | None = None
        self.others: list[PeerId] = []
        self.search: SnapshotSearch = world.search_class(peer, stage, self.generation, _PATIENCE_S)
        self.content: Content | None = None
        self.waits = self.generation > 1 and not is_behind
        self.closes = False
        super().__init__(world, peer, stage, is_behind)

    @property
    def base(self) -> Base:
        return Base(self.machine.tip.round, self.machine.tip.hash, hashes_of(self.theta))

    def started(self) -> None:
        """The process is up."""
        now_s = self.world.network.now_s
        self._search(self.search.begin(self.world.buddies(self) if self.generation > 1 else [], now_s))
        self._tick()

    def _tick(self) -> None:
        self._search(self.search.tick(self.world.network.now_s))
        if self.search.wake_at_s < inf:
            delay_s = max(1e-3, self.search.wake_at_s - self.world.network.now_s)
            self.world.network.on_host(self.peer, delay_s, self._tick)

    def _post(self, to: str, message: SnapshotMessage | TransferMessage, *rest: object) -> None:
        self.world.send(self.peer, to, Parcel(message, *rest))  # type: ignore[arg-type]

    # -- as an owner

    def is_due(self, num_commits: int) -> bool:
        return is_due(num_commits, self.world.every, self.world.cuts.commits(self.machine.round))

    def boundary(self) -> None:
        log = tuple(self.steps.machine.log) if self.steps is not None else ()
        if not self.is_due(len(log)) or self.machine.tip.round + 1 != self.steps.machine.round:  # type: ignore[union-attr]
            return
        machine, since = self.steps.machine, self.steps.since  # type: ignore[union-attr]
        content = (self.theta, tuple(entry.key for entry in log), tuple(map(tuple, since)))
        base = self.base
        state = (base.round, base.record_hash, base.hashes)
        made = log, 1, digest(content), machine.earlier
        snapshot = Snapshot(self.peer, self.stage, self.generation, *state, *made)
        self.made, self.others = (snapshot, content), self.world.buddies(self)
        self._offer()

    def _offer(self) -> None:
        if self.made is not None and self.others:
            self._post(self.others[0], OfferSnapshot(b"", b""), self.made[0])

    # -- messages

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is not Parcel:
            super().deliver(sender, message)
            return
        peer, network = PeerId(sender), self.world.network
        match message.message:
            case OfferSnapshot() if message.snapshot is not None and message.snapshot.peer == self.peer:
                self._search(self.search.receive(peer, message.snapshot, network.now_s))
            case OfferSnapshot() if message.snapshot is not None:
                offered = message.snapshot
                reason = self.store.offered(peer, offered)
                self._post(peer, NoSnapshot(offered.digest, reason) if reason else Want(offered.name))
            case AskSnapshot(stage, generation):
                kept = self.kept.get(peer)
                if kept is None or (kept[0].stage, kept[0].generation) != (
                    stage,
                    self.world.asked_generation(kept[0], generation),
                ):
                    self._post(peer, NoSnapshot("", ""))
                else:
                    self._post(peer, OfferSnapshot(b"", b""), kept[0])
            case Want(name):
                for snapshot, content in filter(None, (self.made, *self.kept.values())):
                    if snapshot.name == name:
                        self._post(peer, Chunk(name, 0), None, content)
                        return
                self._post(peer, Missing(name, 0))
            case Chunk(name) if message.content is not None:
                self._chunk(peer, name.digest, message.content)
            case Missing(name):
                coming = self.store.coming(peer)
                if coming is not None and coming.name == name:
                    self.store.lost(peer)
                    self._post(peer, NoSnapshot(name.digest, "it is gone"))
                self._search(self.search.receive(peer, None, network.now_s))
            case NoSnapshot(of):
                if self.made is not None and self.made[0].digest == of and self.others[:1] == [peer]:
                    self.others = self.others[1:]
                    self._offer()
                else:
                    self._search(self.search.receive(peer, None, network.now_s))
            case SnapshotKept(of) if self.made is not None and self.made[0].digest == of:
                self.world.num_kept += 1
                self.made = None
            case _:
                pass

    def _chunk(self, peer: PeerId, of: str, content: Content) -> None:
        taking, coming = self.search.taking, self.store.coming(peer)
        if taking is not None and peer in self.search.givers and taking.digest == of:
            self.content = content
            self._search(self.search.fetched(digest(content) == of, self.world.network.now_s))
        elif coming is not None and coming.digest == of == digest(content):
            self.store.completed(peer)
            self.kept[peer] = (coming, self.world.flipped(content))
            self._post(peer, SnapshotKept(of))

    def lost(self, peer: str) -> None:
        self.store.lost(PeerId(peer))
        if self.made is not None and self.others[:1] == [peer]:
            self.others = self.others[1:]
            self._offer()
        self._search(self.search.lost(PeerId(peer), self.world.network.now_s))
        super().lost(peer)

    # -- as a new generation

    def _search(self, effects: SearchEffects) -> None:
        for effect in effects:
            match effect:
                case AskBuddy(peer):
                    self._post(peer, AskSnapshot(self.stage, self.generation - 1))
                case Take(snapshot):
                    for peer in sorted(self.search.givers):
                        self._post(peer, Want(snapshot.name))
        if self.waits and self.steps is not None and self.search.is_settled(self.base):
            self.waits = False
            self.steps.begin(self.machine.round)
            self._resume()
            if self.closes:
                self.steps.close()

    def _act(self, effects: list[MemberEffect]) -> None:
        self.closes |= self.waits and any(isinstance(effect, CloseSteps) for effect in effects)
        super()._act([effect for effect in effects if not (self.waits and isinstance(effect, CloseSteps))])

    def _fetch(self, order: Fetch) -> list[MemberEffect]:
        if self.search.is_settled(Base(order.record.round, order.record_hash, order.hashes)):
            return super()._fetch(order)
        self._later(self._fetch, order)
        return []

    def _swap(self, record: object, hashes: StageHashes) -> list[MemberEffect]:
        before = self.machine.tip
        self.waits = False
        effects = super()._swap(record, hashes)
        if self.machine.tip != before:
            self.store.recorded(self.machine.tip.round)
            self.kept = {peer: kept for peer, kept in self.kept.items() if self.store.whole(peer) is not None}
            self._resume()
        return effects

    def _resume(self) -> None:
        snapshot = self.search.take(self.base)
        if snapshot is None or self.steps is None or not self.steps.resume(snapshot):
            return
        self.world.num_resumed += 1
        keys = tuple(entry.key for entry in snapshot.log)
        if self.content is None or self.content[:2] != (self.theta, keys):
            raise Broken(f"{self.peer} goes on from {self.content}, and not from {(self.theta, keys)}")


class SnapshotWorld(World):
    """One seed."""

    is_bulk = staticmethod(is_bulk)

    def __init__(
        self,
        seed: int,
        replica_class: type[StepReplica] = StepReplica,
        search_class: type[SnapshotSearch] = SnapshotSearch,
        host_class: type[SnapshotServer] = SnapshotServer,
    ) -> None:
        self.search_class = search_class
        self.num_kept = self.num_resumed = 0
        super().__init__(seed, replica_class=replica_class, host_class=host_class)

    def sizes(self) -> tuple[int, int]:
        return 2, self.network.rng.choice((2, 2, 3))

    def prepare(self) -> None:
        super().prepare()
        self.every = 1
        self.flip_contents = self.network.rng.choice((0.0, 0.0, 0.3))
        self.deaths_left = self.network.rng.randint(1, 6)
        self.deaths = 4
        replicas = (
            Replica(Hop(PeerId(f"R{stage}.{slot}"), ()), 0.0, stage=StageIndex(stage))
            for stage in range(self.num_stages)
            for slot in range(self.num_slots)
        )
        self.view = SwarmView(replicas=tuple(replicas))

    def buddies(self, server: SnapshotServer) -> list[PeerId]:
        return [buddy.peer for buddy in buddies(self.view, server.machine.hop, server.stage)]

    def asked_generation(self, kept: Snapshot, generation: int) -> int:
        """A buddy that does not look at the generation: the asker's own rule has to hold."""
        return kept.generation if self.flip_contents else generation

    def flipped(self, content: Content) -> Content:
        theta, *others = content
        if self.flip_contents and self.network.rng.random() < self.flip_contents:
            return (digest(theta, "flipped"), *others)
        return content

    def _start_replica(self, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        super()._start_replica(peer, stage, is_behind)
        host = self.network.hosts[peer]
        if isinstance(host, SnapshotServer):
            host.started()

    def before_send(self, trainer: TrainerHost, to: str, message: StepMessage) -> None:
        """Now and then the second replica of a path gets no Commit, and the first one dies soon after."""
        super().before_send(trainer, to, message)
        network = self.network
        is_second = type(message) is Commit and to.startswith("R1")
        if not is_second or not self.deaths or trainer.peer not in network.hosts:
            return
        self.deaths_left -= 1
        if self.deaths_left > 0 or network.now_s > FAULTS_END_S - 6.0:
            return
        self.deaths -= 1
        self.deaths_left = network.rng.randint(1, 6)
        first = next(peer for peer in trainer.machine._path if peer.startswith("R0"))
        # The second one is in doubt about the step, and can ask the first one only when that has begun a new
        # generation.
        network.cut(trainer.peer, to, 3.0)
        network.cut(first, to, 0.7)
        if network.rng.random() < 0.5:
            network.after(0.3, self._crash, trainer.peer)
        network.after(network.rng.uniform(0.3, 0.6), self._die_again, first, network.rng.choice((1, 2, 2)))

    def _die_again(self, peer: str, times: int) -> None:
        host = self.network.hosts.get(peer)
        if isinstance(host, SnapshotServer) and self.twin(host) is not None:
            self.network.crash(peer)
            self.tell_clients()
            if times > 1:
                for buddy in self.buddies(host):
                    self.faults.pause(buddy, 1.2)
                self.network.after(2.2, self._die_again, peer, times - 1)
            self.network.after(self.network.rng.uniform(0.1, 0.4), self.restart_replica, PeerId(peer))

    def restart_replica(self, peer: PeerId) -> None:
        if peer not in self.network.hosts:
            super().restart_replica(peer)
