"""The mirrors of a run: processes around `MirrorMachine`, and what goes wrong with them.

A mirror is there in a share of the seeds, drawn from a source of its own: a seed without one is the same run as ever.
It comes late, fetches slowly, is killed, frozen (in some runs for good), cut off; it is started again with what some
checkpoint of it had, or with nothing; and it may stay announced while it is gone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.round.hosts import hashes_of
from tests.simulation.safety import Broken

from shoal.ids import PeerId
from shoal.swarm.mirror import FetchStage, MirrorEffect, MirrorMachine
from shoal.swarm.record_chains import is_before
from shoal.swarm.records import Tip, names
from shoal.swarm.round_effects import Fetch, Send
from shoal.wire.messages.base import Hop
from shoal.wire.messages.mirror import Follow, Mirrored

if TYPE_CHECKING:
    from tests.simulation.round.world import World

_WORK_S = 0.05
_FOR_GOOD_S = 1000.0


class Copy(NamedTuple):
    """What a mirror has of one stage, and the record whose bytes it says they are."""

    peer: PeerId
    stage: int
    offers: str
    theta: str


class MirrorHost:
    """A mirror whose copies are digests, as a replica's parameters are."""

    def __init__(self, world: World, peer: PeerId, saved: dict[int, tuple[Tip, str]]) -> None:
        self.world, self.peer = world, peer
        held = {stage: tip for stage, (tip, _) in saved.items()}
        self.machine: MirrorMachine = world.mirrors.machine_class(world.num_stages, world.unseal, held)
        self.theta = {stage: theta for stage, (_, theta) in saved.items()}
        self.since_s: dict[int, float] = {}
        self._orders: dict[int, Fetch] = {}
        self._before: dict[int, Tip] = {}
        self._note()

    @property
    def copies(self) -> list[Copy]:
        """What it gives away."""
        held = self.machine.held.items()
        return [Copy(self.peer, stage, tip.hash, self.theta.get(stage, "")) for stage, tip in held]

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, Follow):
            self._act(self.machine.follow(PeerId(sender), message))

    def lost(self, peer: str) -> None:
        self.machine.lost(PeerId(peer))

    def _act(self, effects: list[MirrorEffect]) -> None:
        self._note()
        for effect in effects:
            match effect:
                case Send(peer, message):
                    if isinstance(message, Mirrored):
                        self._tells_the_truth(message)
                    self.world.send(self.peer, peer, message)
                case FetchStage(stage, order):
                    self._follows(stage, order)
                    is_under_way = stage in self._orders
                    self._orders[stage] = order
                    if not is_under_way:
                        self._later(stage, self.world.mirrors.fetch_s)

    def _later(self, stage: int, mean_s: float) -> None:
        network = self.world.network
        delay_s = self.world.mirrors.rng.uniform(0.5, 1.5) * mean_s * min(network.slowness(self.peer), 3.0)
        network.on_host(self.peer, delay_s, self._fetch, stage)

    def _fetch(self, stage: int) -> None:
        """Copy the bytes from whoever holds the record and can be reached; else try again."""
        order = self._orders[stage]
        donor = self.world.donor_of(self.peer, stage, order.record_hash)
        if donor is None:
            self._later(stage, _WORK_S)
            return
        del self._orders[stage]
        self.world.checks.gift(donor, order)
        self.theta[stage] = donor.theta
        self._act(self.machine.fetched(stage, order.record_hash))
        self.world.mirrors.save(self)

    # -- promises

    def _note(self) -> None:
        for stage, tip in self.machine.held.items():
            before = self._before.get(stage)
            if before is not None and is_before(tip, before, self.world.unseal):
                raise Broken(f"{self.peer} holds record {tip.round} of stage {stage}, and has held {before.round}")
            if before != tip:
                self.since_s[stage] = self.world.network.now_s
        self._before = dict(self.machine.held)

    def _follows(self, stage: int, order: Fetch) -> None:
        held = self.machine.held.get(stage)
        if held is not None and self._is_behind(order, held):
            raise Broken(f"{self.peer} goes from record {held.round} of stage {stage} back to {order.record.round}")

    def _is_behind(self, order: Fetch, held: Tip) -> bool:
        """Whether the record that is ordered is one of those before the one that is held."""
        newer = self.world.checks.records.get(held.hash)
        while newer is not None and newer.round > order.record.round:
            if newer.previous == order.record_hash:
                return True
            newer = self.world.checks.records.get(newer.previous)
        return False

    def _tells_the_truth(self, message: Mirrored) -> None:
        for each in message.held:
            for stage in each.stages:
                record = self.world.unseal(each.record)
                if stage not in self.theta or not names(record, stage, hashes_of(self.theta[stage])):
                    raise Broken(f"{self.peer} says that it holds record {record.round} of stage {stage}")


class Mirrors:
    """The mirrors of one world.

    Attributes:
        fetch_s: How long the fetch of a stage takes them on average.
        announced: What the registry says, by peer.
        forgetful: Clients that are on other hosts since all died: they know of no samples.
    """

    def __init__(self, world: World, seed: int, machine_class: type[MirrorMachine] = MirrorMachine) -> None:
        rng = self.rng = random.Random(f"mirrors of {seed}")
        self.world, self.machine_class = world, machine_class
        number = rng.choice((1, 1, 1, 2)) if world.has_faults and rng.random() < 0.3 else 0
        self.peers = [PeerId(f"M{each}") for each in range(number)]
        self.fetch_s = rng.choice((0.05, 0.05, 0.5, 3.0))
        self.announced: dict[PeerId, Hop] = {}
        self._announced_s: dict[PeerId, float] = {}
        self.forgetful: set[PeerId] = set()
        self._is_alone = False
        self._records_left, self._end_s = 0, 0.0
        self._saved: dict[PeerId, dict[int, tuple[Tip, str]]] = {}

    def plan(self, end_s: float) -> None:
        """Start them, and decide what goes wrong beside the faults that hit everybody."""
        network, rng = self.world.network, self.rng
        for peer in self.peers:
            network.at(rng.choice((0.0, 0.0, rng.uniform(0.5, end_s - 8.0))), self._start, peer)
            if rng.random() < 0.2:
                network.at(rng.uniform(0.0, end_s), self._freeze_for_good, peer)
        if self.peers and rng.random() < 0.5:
            network.at(rng.uniform(4.0, end_s - 6.0), self._black_out, end_s)
        if self.peers:
            network.after(1.0, self._confuse)
        self._records_left = rng.randint(1, 5) if self.peers and rng.random() < 0.7 else 0
        self._end_s = end_s

    def hosts(self) -> list[MirrorHost]:
        """Those that run."""
        hosts = (self.world.network.hosts.get(peer) for peer in self.peers)
        return [host for host in hosts if isinstance(host, MirrorHost)]

    def announced_since(self, peer: PeerId) -> float:
        """Since when the registry names a mirror."""
        return self._announced_s[peer] if peer in self.announced else math.inf

    def save(self, host: MirrorHost) -> None:
        """Now and then there is a checkpoint."""
        if self.rng.random() < 0.5:
            self._saved[host.peer] = {
                stage: (tip, host.theta[stage]) for stage, tip in host.machine.held.items() if stage in host.theta
            }

    def begin_anew(self) -> None:
        """All of the run are gone, and what anybody knew of it: mirrors are started again, most of them."""
        self._saved.clear()
        self.announced.clear()
        self.forgetful.clear()
        self._is_alone = False
        for peer in self.peers:
            if self.rng.random() < 0.8:
                self.world.network.after(self.rng.uniform(0.2, 6.0), self._start, peer)

    def have_followed(self, round: int) -> None:
        """In the end every mirror that is there and not frozen holds of all stages what is newer than this record."""
        for host in self.hosts():
            rounds = {stage: tip.round for stage, tip in host.machine.held.items()}
            is_there = self.world.network.awake(host.peer) and host.peer in self.announced
            if is_there and min(rounds.get(stage, 0) for stage in range(self.world.num_stages)) < round:
                raise Broken(f"{host.peer} has not followed record {round}: it holds {rounds}")

    def crash(self, peer: PeerId) -> None:
        """End a mirror, unless nobody else knows of the run; most are started again."""
        network, rng = self.world.network, self.rng
        if self.is_needed:
            return
        network.crash(peer, silently=rng.random() < 0.25)
        if rng.random() < 0.5:
            self.announced.pop(peer, None)
            self.world.tell_clients()
        if rng.random() < 0.8:
            network.after(rng.uniform(0.1, 4.0), self._start, peer)

    def _start(self, peer: PeerId) -> None:
        if peer in self.world.network.hosts:
            return
        saved = self._saved.get(peer, {}) if self.rng.random() < 0.5 else {}
        self.world.network.start(peer, MirrorHost(self.world, peer, dict(saved)))
        self.announced[peer] = Hop(peer, (f"boot:{self.world.network.boots[peer]}",))
        self._announced_s[peer] = self.world.network.now_s
        self.world.tell_clients()

    def _confuse(self) -> None:
        """While several clients lead, a mirror is now and then cut off from the one that it follows: it follows another
        one then, which may have gone less far."""
        network, rng = self.world.network, self.rng
        if network.now_s > self._end_s - 2.0:
            return
        network.after(0.5, self._confuse)
        if sum(client.leads for client in self.world.client_hosts()) > 1 and rng.random() < 0.4:
            for host in self.hosts():
                if host.machine.promised.peer in network.hosts:
                    network.cut(host.peer, host.machine.promised.peer, rng.uniform(0.3, 1.5))

    def _freeze_for_good(self, peer: PeerId) -> None:
        if peer in self.world.network.hosts and not self.is_needed:
            self.world.network.pause(peer, _FOR_GOOD_S)

    @property
    def is_needed(self) -> bool:
        """Whether, since all replicas have died, some stage has none that holds a record again."""
        holding = {host.stage for host in self.world.replica_hosts() if host.machine.tip.signed is not None}
        self._is_alone = self._is_alone and len(holding) < self.world.num_stages
        return self._is_alone

    def committed(self) -> None:
        """A record is committed: once, soon after one, a stage loses all its replicas."""
        self._records_left -= 1
        if self._records_left == 0:
            self.world.network.after(self.rng.uniform(0.0, 1.5), self._lose_stage)

    def _lose_stage(self) -> None:
        """All replicas of a stage die, and are started again; mostly something happens to mirrors or clients too."""
        world, rng, network = self.world, self.rng, self.world.network
        stage = rng.randrange(world.num_stages)
        victims = [host for host in world.replica_hosts() if host.stage == stage]
        if network.now_s > self._end_s - 8.0 or not world.is_known_without(victims):
            return
        for victim in victims:
            network.crash(victim.peer)
            network.after(rng.uniform(0.1, 2.0), world.restart_replica, victim.peer)
        what = rng.choice(("nothing", "takeover", "dies", "freezes", "freezes for good", "is cut off"))
        if what == "takeover":
            for client in world.client_hosts():
                world.crash_client(client.peer, loses_power=False)
        for mirror in self.hosts():
            match what:
                case "dies":
                    self.crash(mirror.peer)
                case "freezes":
                    network.pause(mirror.peer, rng.uniform(1.0, 7.0))
                case "freezes for good":
                    self._freeze_for_good(mirror.peer)
                case "is cut off":
                    for client in world.client_hosts():
                        network.cut(client.peer, mirror.peer, rng.uniform(0.0, 6.0))
                case _:
                    pass
        world.tell_clients()

    def _black_out(self, until_s: float) -> None:
        """All replicas die at once, where a mirror has all that anybody knows; mostly with all clients."""
        world, rng = self.world, self.rng
        network = world.network
        keepers = self.keepers()
        if not keepers:
            if network.now_s < until_s - 6.0:
                network.after(0.1, self._black_out, until_s)
            return
        self._is_alone = True
        if rng.random() < 0.5:
            network.pause(keepers[0].peer, rng.uniform(0.5, 3.5))
        clients = [host.peer for host in world.client_hosts()] if rng.random() < 0.7 else []
        self._forget(world.resumption.lost_with(clients))
        for client in clients:
            world.crash_client(client, loses_power=False)
        for host in world.replica_hosts():
            network.crash(host.peer)
            network.after(rng.uniform(0.5, 3.0), world.restart_replica, host.peer)
        world.tell_clients()

    def alone_without(self, clients: list[PeerId]) -> None:
        """Only mirrors are left, and these clients will know of nothing."""
        self._is_alone = True
        self._forget(clients)

    def _forget(self, clients: Collection[PeerId]) -> None:
        """They begin on other hosts: no round, and no samples."""
        self.forgetful |= set(clients)
        for client in clients:
            self.world.forget(client)

    def keepers(self) -> list[MirrorHost]:
        """Those that alone could give all that anybody knows."""
        return [host for host in self.hosts() if self._has_all(host) and self.world.network.awake(host.peer)]

    def _has_all(self, mirror: MirrorHost) -> bool:
        """Whether nothing is known of the chain that this mirror does not hold the bytes of."""
        held = {tip.hash for tip in mirror.machine.held.values()}
        is_whole = len(mirror.machine.held) == self.world.num_stages and len(held) == 1
        replicas = [host.machine for host in self.world.replica_hosts()]
        return is_whole and all(
            {each.tip.hash} <= held and each.prepared is None and each.swapping is None for each in replicas
        )
