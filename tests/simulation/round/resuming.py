"""A run of which nobody is left but a checkpoint, and that goes on from it: `--resume`.

That happens in a share of the seeds that have a mirror, drawn from a source of its own: a seed without it is the same
run as ever. All processes die at once. What stays is the state of all stages at a committed record, the newest one or
one some records before. A client begins with that record and keeps all stages, as `client.resuming` and
`client.keeping` have it; servers come as newcomers, some of them as peers that the record knows, and so do mirrors.
Clients of other hosts come when this one leads. In some of these runs a stage is lost with the first record, and in
most everybody but a mirror dies once more.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.round.hosts import ClientHost
from tests.simulation.round.mirrors import Copy
from tests.simulation.safety import Broken

from shoal.ids import PeerId
from shoal.swarm.records import Tip, outcome_of, record_hash, used_samples
from shoal.swarm.resumption import is_superseded, still_resumes
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.round import Record, SignedRecord

if TYPE_CHECKING:
    from tests.simulation.round.world import World

_TIP = "the record with which the next start begins"
_HAS_GONE_ON = "whether a round was begun on a later record than the checkpoint's"
_ANEW = 10
"""What the number of a server that has not been there before is higher by."""


class Checkpoint(NamedTuple):
    """A record, and the bytes of every stage that it names."""

    tip: Tip
    theta: dict[int, str]


class Keeping:
    """What a client keeps of a checkpoint until servers have it: it says so at once, and gives what it has read."""

    def __init__(self, client: ClientHost, checkpoint: Checkpoint, read_s: float) -> None:
        self.client, self.checkpoint = client, checkpoint
        self.copies: dict[int, Copy] = {}
        self.say(checkpoint.theta)
        network = client.world.network
        for stage in checkpoint.theta:
            network.on_host(client.peer, (stage + 1) * read_s, self.read, stage)

    @staticmethod
    def still_resumes(resumed: SignedRecord | None, base: str) -> SignedRecord | None:
        """The record with which the next start is to begin."""
        return still_resumes(resumed, base)

    @staticmethod
    def used(record: Record) -> Ranges:
        """The samples that the data server takes for used."""
        return used_samples(record)

    def say(self, stages: dict[int, str]) -> None:
        """The coordinator is told before anything is read."""
        for stage in stages:
            self.client.machine.keep(stage, self.checkpoint.tip)

    def read(self, stage: int) -> None:
        """A stage is read; newcomers can have it."""
        tip = self.checkpoint.tip
        self.copies[stage] = Copy(self.client.peer, stage, tip.hash, self.checkpoint.theta[stage])
        self.client.machine.keep(stage, tip)

    def release(self) -> None:
        """Drop what servers hold something newer of."""
        machine = self.client.machine
        for stage in list(self.copies):
            if is_superseded(stage, self.checkpoint.tip.round, machine.tip.round, machine.holders or {}):
                del self.copies[stage]
                machine.keep(stage, None)


class Resumption:
    """The one of a world, if it has one.

    Attributes:
        checkpoint: From which the run was resumed; None before.
        is_lost: The host is gone from which it was resumed, with all that it knew: what is promised ends there.
    """

    def __init__(self, world: World, seed: int, keeping_class: type[Keeping] = Keeping) -> None:
        rng = self.rng = random.Random(f"resumed {seed}")
        self.world, self.keeping_class = world, keeping_class
        self.is_planned = world.can_resume and bool(world.mirrors.peers) and rng.random() < 0.3
        self.checkpoint: Checkpoint | None = None
        self.is_lost = False
        self._client: PeerId | None = None
        self._has_led = False
        self._read_s = rng.choice((0.05, 0.5, 1.5))
        self._age = rng.choice((0, 0, 1, 2, 3))
        self._committed: list[tuple[Record, SignedRecord]] = []
        self._keeping: Keeping | None = None
        self._end_s = 0.0
        self._is_spared = rng.random() < 0.3
        self._stage_rng = random.Random(f"first record of resumed {seed}")
        self._loses_stage = self._stage_rng.random() < 0.3

    def plan(self, end_s: float) -> None:
        """Decide when it happens."""
        self._end_s = end_s
        if self.is_planned:
            self.world.network.at(self.rng.uniform(4.0, end_s - 10.0), self._lose_all)

    def committed(self, record: Record, signed: SignedRecord) -> None:
        """A record stands: there may be a checkpoint of it."""
        if self.is_planned and all(record.round > known.round for known, _ in self._committed):
            self._committed.append((record, signed))

    def tip_of(self, client: PeerId) -> Tip | None:
        """What a start of a client knows from its disk: nothing more once it has begun a round on a later record."""
        if self.checkpoint is None or client != self._client or client in self.world.mirrors.forgetful:
            return None
        return self.world.disks[client].read(_TIP, self.checkpoint.tip)

    def may_start(self, client: PeerId) -> bool:
        """Clients of other hosts wait for the one that resumes the run."""
        return self.checkpoint is None or self._has_led or client == self._client

    def started(self, host: ClientHost) -> None:
        """A client was started."""
        if self.checkpoint is not None and host.peer == self._client:
            is_there = self.tip_of(host.peer) is not None
            self._keeping = self.keeping_class(host, self.checkpoint, self._read_s) if is_there else None

    def acted(self, host: ClientHost) -> None:
        """A client has done something."""
        if (keeping := self.keeping_of(host)) is None:
            return
        keeping.release()
        if self._loses_stage and host.machine.tip.round > keeping.checkpoint.tip.round:
            self._loses_stage = False
            # When its commits are on their way, and none has arrived.
            self.world.network.after(0.0, self._lose_stage)

    def lost_with(self, clients: list[PeerId]) -> set[PeerId]:
        """All replicas have died, and these clients; returns those that are on other hosts from then on."""
        if self.checkpoint is None or self._client not in clients:
            return set(clients)
        if self.rng.random() < 0.3:
            self.is_lost = True
            return set(clients)
        self._has_led = False
        return set(clients) - {self._client}

    def begins(self, host: ClientHost) -> None:
        """A client trains on a record that stands."""
        if self.checkpoint is None:
            return
        self._has_led = True
        if host.peer != self._client or self.is_lost:
            return
        has_gone_on = host.machine.tip.hash != self.checkpoint.tip.hash
        # A mirror that has answered may have no more than the checkpoint, and the one that has was waited for in vain.
        is_given = self.checkpoint.tip in host.machine._mirrors.tips
        if host.disk.read(_HAS_GONE_ON) and not has_gone_on and not is_given:
            raise Broken(f"{host.peer} goes back to the checkpoint, and has begun a round on a later record")
        host.disk.write(_HAS_GONE_ON, has_gone_on)
        tip = self.tip_of(host.peer)
        resumed = None if tip is None else self.keeping_class.still_resumes(tip.signed, host.machine.tip.hash)
        host.disk.write(_TIP, None if resumed is None else tip)
        if has_gone_on and not self._is_spared:
            self._is_spared = True
            self.world.network.after(self.rng.uniform(0.0, 2.0), self._lose_servers)

    def keeping_of(self, host: ClientHost) -> Keeping | None:
        """What a client keeps."""
        is_its_own = self._keeping is not None and self._keeping.client is host
        return self._keeping if is_its_own else None

    def copies(self) -> list[Copy]:
        """What the client gives away."""
        keeping = self._keeping
        is_there = keeping is not None and self.world.network.hosts.get(keeping.client.peer) is keeping.client
        return list(keeping.copies.values()) if keeping is not None and is_there else []

    def _lose_all(self) -> None:
        """Everybody dies; then the run goes on from a checkpoint."""
        world, rng, network = self.world, self.rng, self.world.network
        if not self._committed:
            if network.now_s < self._end_s - 9.0:
                network.after(0.25, self._lose_all)
            return
        for peer in list(network.hosts):
            network.crash(peer)
        record, signed = self._committed[max(0, len(self._committed) - 1 - self._age)]
        stages = range(world.num_stages)
        theta = {
            stage: outcome.hashes.parameters for stage in stages if (outcome := outcome_of(record, stage)) is not None
        }
        self.checkpoint = Checkpoint(Tip(record.round, record_hash(signed), signed), theta)
        self._client = rng.choice(world.clients)
        world.checks.goes_back(record, record_hash(signed))
        world.data.begin_anew(record.round, self.keeping_class.used(record))
        world.mirrors.begin_anew()
        self._rename()
        network.after(rng.uniform(0.2, 3.0), world.start_client, self._client)
        for client in world.clients:
            network.after(rng.uniform(0.2, 6.0), world.start_client, client)
        for peer in world.replicas:
            network.after(rng.choice((rng.uniform(0.2, 2.0), rng.uniform(0.2, 5.0))), world.restart_replica, peer)

    def _lose_stage(self) -> None:
        """The first record on top of the checkpoint is committed, and all who have one stage's bytes of it die."""
        world, rng = self.world, self._stage_rng
        stage = rng.randrange(world.num_stages)
        victims = [host for host in world.replica_hosts() if host.stage == stage]
        if not world.is_known_without(victims):
            return
        for victim in victims:
            world.network.crash(victim.peer)
            world.network.after(rng.uniform(0.2, 2.0), world.restart_replica, victim.peer)
        world.tell_clients()

    def _lose_servers(self) -> None:
        """The run has gone on, and a mirror has all of it. It freezes, all others die; the client comes back first.

        If its host has lost power, it may have forgotten that the run has gone on: then it waits for the mirror, for a
        while. If not it waits for as long as it takes.
        """
        world, rng, network = self.world, self.rng, self.world.network
        keepers = world.mirrors.keepers()
        if self.is_lost or self._client is None or network.now_s > self._end_s:
            return
        if not keepers or self._client not in network.hosts:
            if network.now_s < self._end_s - 8.0:
                network.after(0.1, self._lose_servers)
            return
        loses_power, others = rng.random() < 0.5, [client for client in world.clients if client != self._client]
        for mirror in world.mirrors.hosts():
            network.pause(mirror.peer, rng.uniform(2.0, 3.5) if loses_power else rng.uniform(4.5, 7.0))
        for peer in (*world.clients, *world.replicas):
            if peer in network.hosts:
                network.crash(peer)
        if loses_power:
            world.disks[self._client].lose_power()
        world.mirrors.alone_without(others)
        self._has_led = False
        network.after(rng.uniform(0.1, 0.8), world.start_client, self._client)
        for client in others:
            network.after(rng.uniform(0.2, 6.0), world.start_client, client)
        for peer in world.replicas:
            network.after(rng.uniform(0.1, 1.5), world.restart_replica, peer)

    def _rename(self) -> None:
        """Some servers are others than before, and of some stages there are fewer."""
        world, rng = self.world, self.rng
        anew_rate = rng.choice((0.0, 0.5, 1.0))
        peers: list[PeerId] = []
        for peer in world.replicas:
            stage, slot = peer[1:].split(".")
            if rng.random() < 0.8 or not any(other.startswith(f"R{stage}.") for other in peers):
                peers.append(PeerId(f"R{stage}.{int(slot) + _ANEW}") if rng.random() < anew_rate else peer)
        world.replicas = peers
